"""The loader of a Hugging Face model: checkpoint names in, copies into its parameters out."""

import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from wsync.adapters.trainers.names import Source, held_tensors, sources
from wsync.errors import EngineStateError, MismatchError, UnsupportedError, first_five
from wsync.topology import Endpoint, local_endpoint

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class HFLoader:
    """Meets `wsync.protocols.Loader` for any module; stacked experts of transformers go by their checkpoint names.

    Holds the model weakly: whoever owns the model decides how long it lives.
    """

    whole = True

    def __init__(self, model: nn.Module, checkpoint: Path | None = None) -> None:
        """`checkpoint`: the folder whose weights `model` holds now, if it is known that it does.

        Raises `UnsupportedError` if the model computes a checkpoint tensor from its parameters.
        """
        self.engine = _engine_name()
        self._model = weakref.ref(model)
        self._checkpoint = checkpoint
        self._files = _stamps(checkpoint)
        held = held_tensors(model)
        found = sources(model, held)
        self._sources = {source.name: source for source in found}
        # A name that stands for several checkpoint tensors counts once; tied ones have only their first name here.
        self._required = list(dict.fromkeys(source.parent for source in found if not source.optional))

    def endpoint(self) -> Endpoint:
        """This process and the device of the model. Raises `UnsupportedError` if it is spread over several."""
        devices = {item.tensor.device for item in held_tensors(self._live()).values()}
        if len(devices) != 1:
            raise UnsupportedError(
                f"the model is spread over {sorted(map(str, devices))}; it must lie on one device to be synced"
            )
        return local_endpoint(devices.pop())

    def targets(self) -> Mapping[str, torch.Tensor]:
        """Every parameter and buffer by its name in memory, tied ones under each name."""
        return {name: item.tensor for name, item in held_tensors(self._live()).items()}

    def required(self) -> Sequence[str]:
        """Every parameter and persistent buffer, tied ones once."""
        return self._required

    def accepts(self, name: str) -> bool:
        """Whether `name` is a non-persistent buffer of the model."""
        source = self._sources.get(name)
        return source is not None and source.optional

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each (checkpoint name, full tensor) to its place, with a cast if the dtypes differ.

        Raises `MismatchError` for an unknown name or a wrong shape; what came before it is loaded.
        """
        targets = self.targets()
        with torch.no_grad():
            for name, tensor in weights:
                source = self._sources.get(name)
                if source is None:
                    raise MismatchError(f"{name}: the model has no such tensor{self._hint(name, targets)}")
                if tuple(tensor.shape) != source.shape:
                    raise MismatchError(
                        f"{name}: its shape is {list(tensor.shape)}, the model wants {list(source.shape)}"
                    )
                _place(source, targets[source.parent], tensor)

    def launch_weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """The checkpoint that the model was launched from, one tensor at a time; None if there is none any more."""
        unchanged = self._checkpoint is not None and self._files == _stamps(self._checkpoint)
        return self._stream(self._checkpoint) if unchanged and self._checkpoint is not None else None

    def begin(self) -> None:
        """Nothing to prepare: weights are used as they lie."""

    def finish(self) -> None:
        """Nothing to process: weights are used as they lie."""

    def rollback(self) -> None:
        """Nothing to undo: any full sync may follow."""

    def _live(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise EngineStateError("the model of this engine no longer exists; keep a reference to it")
        return model

    def _hint(self, name: str, targets: Mapping[str, torch.Tensor]) -> str:
        if name not in targets:
            return ""
        parts = [source for source in self._sources.values() if targets[source.parent] is targets[name]]
        if parts and parts[0].parent != name:
            return f" of its own: it is tied to {parts[0].name}"
        return f" in its checkpoint; it takes {first_five([part.name for part in parts])}" if parts else ""

    def _stream(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        for file in checkpoint_files(folder):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    if name in self._sources:
                        yield name, opened.get_tensor(name)


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded or not; empty if `folder` holds none."""
    index = folder / _INDEX
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        return [folder / name for name in dict.fromkeys(names)]
    single = folder / _SINGLE
    return [single] if single.is_file() else []


def _stamps(folder: Path | None) -> list[tuple[int, ...]] | None:
    """Different after a trainer wrote its next checkpoint over this one; None if a file is gone."""
    if folder is None:
        return None
    try:
        stats = [file.stat() for file in checkpoint_files(folder)]
    except OSError:
        return None
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]


def _place(source: Source, parent: torch.Tensor, tensor: torch.Tensor) -> None:
    if source.shape == tuple(parent.shape) and source.region.numel == parent.numel() and source.region.is_monotone:
        parent.copy_(tensor)
        return
    if not parent.is_contiguous():
        raise UnsupportedError(f"{source.name} is a part of {source.parent}, which is not contiguous in memory")
    region = source.region
    view = parent.as_strided(region.sizes, region.strides, parent.storage_offset() + region.offset)
    view.copy_(tensor.reshape(region.sizes))


def _engine_name() -> str:
    try:
        from transformers import __version__
    except ImportError:
        return "a module with generate()"
    return f"transformers {__version__}"
