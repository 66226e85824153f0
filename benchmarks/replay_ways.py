"""Ways to copy all tensors of a model into an engine's parameters: wsync's kernels, torch's, one by one, CUDA graphs.

    python -m benchmarks.replay_ways [--json FILE]        # a GPU with 50 GB free; --small tries it on a CPU

As a load plan has them: q, k and v are rows of one parameter, gate and up too, and in the MoE all experts of a layer.
For everything but wsync's kernels views are made once, before: none of that time is in what is shown. Every way is
checked, bit by bit, on random weights. Graphs are captured around the calls that are timed without them.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wsync.bench.gpu.cases import CAST
from wsync.bench.gpu.checks import free
from wsync.bench.gpu.models import DENSE, MOE, config_of, engine_side
from wsync.bench.gpu.outcome import COPY, Outcome, in_turn, seconds_on_device
from wsync.bench.machine import as_text
from wsync.bench.samples import Way, seconds_of
from wsync.copies import Copies, Keys
from wsync.regions import Region
from wsync.views import Pair, Place

ROUNDS = 12
KERNELS, FOREACH, LOOP = "wsync's copies", "_foreach_copy_", "copy_ in a loop"
IN_GRAPH = ", in a CUDA graph"
VARIANTS = ((DENSE, torch.bfloat16), (MOE, torch.bfloat16), (DENSE, torch.float32))
"""Shapes, and the dtype of what is copied into bf16."""

_ALIGNMENT = 256
"""Elements between which tensors begin, as far as torch's allocator would have them apart."""


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor, and the rows of an engine's parameter that it becomes: all counted in elements."""

    target: int
    """Number of the parameter."""

    start: int
    """Of the rows in it."""

    numel: int


def fused(name: str) -> str:
    """What vLLM calls the parameter that `name` is a part of, or close to that."""
    name = re.sub(r"\b[qkv]_proj\b", "qkv_proj", name)
    name = re.sub(r"\b(gate|up)_proj\b", "gate_up_proj", name)
    return re.sub(r"\bexperts\.\d+\.", "experts.", name)


def moves_of(shape: str, *, small: bool) -> list[Move]:
    """One for each tensor of the model, in order; parts of a parameter come in the order of its rows."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, torch.bfloat16, small=small))
    numbers, filled, moves = dict[str, int](), dict[int, int](), list[Move]()
    for name, tensor in engine_side(model):
        target = numbers.setdefault(fused(name), len(numbers))
        moves.append(Move(target, filled.get(target, 0), tensor.numel()))
        filled[target] = filled.get(target, 0) + tensor.numel()
    return moves


class Model:
    """Random weights and the parameters that they go to, each kind in one allocation."""

    def __init__(self, moves: Sequence[Move], dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: of the weights. Parameters are in bf16."""
        self.numel = sum(move.numel for move in moves)
        sizes = dict[int, int]()
        for move in moves:
            sizes[move.target] = sizes.get(move.target, 0) + move.numel
        self.weights, self.sources = _cut([move.numel for move in moves], dtype, device)
        self.parameters, self.targets = _cut([sizes[number] for number in range(len(sizes))], torch.bfloat16, device)
        self.weights.uniform_(-1, 1)
        self.pairs = [self._pair(number, move) for number, move in enumerate(moves)]
        self.rows = [self.targets[move.target][move.start : move.start + move.numel] for move in moves]

    def _pair(self, number: int, move: Move) -> Pair:
        source, target = Region.span(0, move.numel), Region.span(move.start, move.numel)
        return (
            Place(memory=number, dtype=self.weights.dtype, region=source),
            Place(memory=move.target, dtype=torch.bfloat16, region=target),
        )

    @property
    def nbytes(self) -> int:
        """That arrive."""
        return self.numel * torch.bfloat16.itemsize

    def arrived(self, way: Way) -> bool:
        """Whether `way` brings every bit."""
        self.parameters.fill_(torch.nan)
        way()
        return all(
            torch.equal(row.view(torch.int16), source.to(torch.bfloat16).view(torch.int16))
            for source, row in zip(self.sources, self.rows, strict=True)
        )


def _cut(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One allocation, and a tensor of each size in it."""
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    whole = torch.empty(sum(padded), dtype=dtype, device=device)
    pieces = torch.split_with_sizes(whole, padded)
    return whole, [piece[:size] for piece, size in zip(pieces, sizes, strict=True)]


def floors_of(model: Model) -> dict[str, Way]:
    """What no way can be faster than. They leave anything in the parameters."""
    target, source = (whole.view(torch.uint8)[: model.nbytes] for whole in (model.parameters, model.weights))
    floors: dict[str, Way] = {COPY: lambda: target.copy_(source)}
    if model.weights.dtype != torch.bfloat16:
        elements, casts = model.parameters[: model.numel], model.weights[: model.numel]
        floors[CAST] = lambda: elements.copy_(casts)
    return floors


def ways_of(model: Model) -> dict[str, Way]:
    """Each brings all tensors once."""
    copies, rows, sources = Copies(model.pairs), model.rows, model.sources
    keys: Keys = (object(), object())  # as in a sync in which nothing has moved

    def one_by_one() -> None:
        for row, source in zip(rows, sources, strict=True):
            row.copy_(source)

    ways: dict[str, Way] = {
        KERNELS: lambda: copies.run(sources, model.targets, keys),
        FOREACH: lambda: torch._foreach_copy_(rows, sources),
        LOOP: one_by_one,
    }
    if model.weights.is_cuda:
        ways |= {f"{name}{IN_GRAPH}": _replay(ways[name]) for name in (KERNELS, FOREACH)}
    return ways


def _replay(way: Way) -> Way:
    """What it queues, captured once."""
    make: Any = torch.cuda
    stream, graph = make.Stream(), make.CUDAGraph()
    with torch.cuda.stream(stream):
        way()  # compiled, and sent on this stream, before: neither can be captured
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        way()
    return lambda: graph.replay()


def measure(shape: str, dtype: torch.dtype, device: torch.device, *, small: bool) -> Outcome:
    """All ways for one shape: wsync's copies as what is measured, the others as its references."""
    moves = moves_of(shape, small=small)
    model = Model(moves, dtype, device)
    ways = ways_of(model)
    name = f"{shape}, {str(dtype).removeprefix('torch.')} to bfloat16"
    outcome = Outcome(case=f"replay of {name}", tensors=len(moves), nbytes=model.nbytes)
    outcome.facts["parameters"] = len(model.targets)
    outcome.checks |= {f"right bytes by {way}": model.arrived(run) for way, run in ways.items()}
    clock = seconds_on_device if device.type == "cuda" else seconds_of
    outcome.samples = in_turn(ways.pop(KERNELS), {**floors_of(model), **ways}, ROUNDS, clock)
    return outcome


def lines_of(outcome: Outcome) -> list[str]:
    """A table of one variant."""
    samples = outcome.samples
    assert samples is not None
    medians = {KERNELS: samples.median_s} | {name: samples.reference_median_s(name) for name in samples.references}
    into = f"{outcome.tensors} tensors into {outcome.facts['parameters']}, {outcome.nbytes / 1e9:.1f} GB"
    lines = [f"{outcome.case}: {into}", f"  {'':<34}{'ms':>9}{'x copy':>9}"]
    for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
        wrong = "" if outcome.checks.get(f"right bytes by {name}", True) else "  WRONG"
        lines.append(f"  {name:<34}{seconds * 1e3:>9.2f}{seconds / medians[COPY]:>9.2f}{wrong}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Returns 0 if every byte was right."""
    options = _parser().parse_args(argv)
    if not (options.small or torch.cuda.is_available()):
        print("benchmarks.replay_ways needs a CUDA device; --small tries it without", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    outcomes = []
    for shape, dtype in VARIANTS:
        outcomes.append(measure(shape, dtype, device, small=options.small))
        free()  # the next one takes as much
    if options.json:
        options.json.write_text(as_text(rows=[outcome.as_json() for outcome in outcomes]))
    for outcome in outcomes:
        print("\n".join(lines_of(outcome)))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_ways")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows as python -m wsync.bench does")
    parser.add_argument("--small", action="store_true", help="small models, on a CPU too, where there are no graphs")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
