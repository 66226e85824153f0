"""Proves a load plan on the weights that an engine was launched with, before the plan is trusted.

A load plan says what `load_weights` would do. Some engines repack parameters after loading and keep them under the old
shape: there the loader's own copies would be wrong. The sign is that the launch checkpoint, sent through the plan,
would not give the bytes that are live now. Nothing is written to find that out.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from wsync.errors import first_five
from wsync.loadplan import Copy, Layout, LoadPlan
from wsync.protocols import Loader
from wsync.strided import memory_view


def check_launch_weights(loader: Loader, plan: LoadPlan) -> tuple[str, list[str]]:
    """Compare live bytes with what `plan` would write from the launch checkpoint.

    Returns:
        How the plan was verified, for people, and a sentence for each live tensor that would change. Only if every
        source that the plan copies was compared, the first begins with "verified".
    """
    weights = loader.launch_weights()
    if weights is None:
        return "unverified: the engine was launched without a checkpoint that can be read", []
    targets = loader.targets()
    by_source: dict[str, list[Copy]] = defaultdict(list)
    for copy in plan.copies:
        by_source[copy.source].append(copy)
    differing: dict[str, list[str]] = defaultdict(list)
    problems = []
    expected = [name for name in by_source if not plan.specs[name].optional]  # no checkpoint holds the others
    unseen = dict.fromkeys(expected)
    for name, tensor in weights:
        if name not in by_source:
            continue
        shape = plan.specs[name].shape
        if tuple(tensor.shape) != shape:
            problems.append(f"{name}: launched with shape {list(tensor.shape)}, offered with {list(shape)}")
            continue
        flat = tensor.contiguous()
        unseen.pop(name, None)
        for copy in by_source[name]:
            if not _equal(memory_view(targets[copy.target], copy.dst), memory_view(flat, copy.src)):
                differing[copy.target].append(name)
    problems += [_repacked(loader.engine, target, plan.layouts[target], names) for target, names in differing.items()]
    return _verdict(len(expected), list(unseen)), problems


def _verdict(copied: int, unseen: Sequence[str]) -> str:
    if not copied:
        return "unverified: the plan copies no tensor"
    if unseen:
        return (
            f"unverified: {copied - len(unseen)} of {copied} tensors were compared with the launch weights; "
            f"these are not among them: {first_five(unseen)}"
        )
    return f"verified: {copied} of {copied} tensors against the launch weights"


def _repacked(engine: str, target: str, layout: Layout, sources: Iterable[str]) -> str:
    return (
        f"{target} {list(layout.shape)}: its live bytes are not what the loader of {engine} writes from the launch "
        f"checkpoint ({first_five(list(sources))}); the engine repacks it after loading, or was changed since launch. "
        f"Launch it with that repacking switched off"
    )


def _equal(live: torch.Tensor, source: torch.Tensor) -> bool:
    """Bitwise, so that a NaN equals itself."""
    expected = source.to(dtype=live.dtype, device=live.device)
    return torch.equal(_bits(live), _bits(expected))


_WORDS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.itemsize == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_WORDS[tensor.dtype.itemsize])
