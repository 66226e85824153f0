"""FSDP2 shards on gloo ranks into the sender's slot, against the per-parameter loops. Prints medians and ratios.

OMP_NUM_THREADS=1 python -m benchmarks.measure_gather
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.baselines.full_tensor_loops import cast_then_gather, gather_then_cast
from wsync.adapters.trainers.fsdp import FSDPProducer
from wsync.config import MIB
from wsync.group import Group
from wsync.plan import Plan, TensorSpec
from wsync.testing.ranks import Rank, run_ranks

TENSORS = 320
TIMEOUT_S = 300.0


def measure(me: Rank, tensor_nbytes: int, senders: Sequence[int], rounds: int) -> dict[str, float]:
    """Median seconds of each way on this rank, taken in turn so that a noisy neighbour hits all of them."""
    rows = tensor_nbytes // 4 // 256
    model = nn.Module()
    model.weights = nn.ParameterList(nn.Parameter(torch.randn(rows, 256)) for _ in range(TENSORS))
    fully_shard(model)
    parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    producer, plan = _prepare(me, model, senders)
    slots = [torch.empty(plan.capacity, dtype=torch.uint8) for _ in range(2)] if me.rank in senders else []

    def packed() -> None:
        producer.open()
        for bucket in plan.buckets:
            producer.stage(bucket)
            producer.fill(bucket, slots[bucket.index % 2] if slots else None)
        producer.close()

    ways: dict[str, Callable[[], None]] = {
        "gather_then_cast": lambda: gather_then_cast(parameters, torch.bfloat16),
        "cast_then_gather": lambda: cast_then_gather(parameters, torch.bfloat16),
        "wsync": packed,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def _prepare(me: Rank, model: nn.Module, senders: Sequence[int]) -> tuple[FSDPProducer, Plan]:
    producer = FSDPProducer(model)
    by_rank: list[Sequence[TensorSpec]] = [()] * me.world_size
    dist.all_gather_object(by_rank, list(producer.metadata()))
    specs = [
        TensorSpec(
            name=same[0].name,
            shape=same[0].shape,
            dtype=torch.bfloat16,
            owners=tuple(owner for spec in same for owner in spec.owners),
        )
        for same in zip(*by_rank, strict=True)
    ]
    plan = Plan.pack(specs, 256 * MIB)
    producer.prepare(plan, senders, Group(me.rank, me.world_size, PrefixStore("measure", me.store), TIMEOUT_S))
    return producer, plan


def main() -> None:
    """Both tensor sizes of the design's targets, with one sender and with every rank a sender."""
    for tensor_nbytes, rounds in ((64 << 10, 9), (2 << 20, 5)):
        for senders in ([0], [0, 1]):
            seconds = run_ranks(measure, 2, tensor_nbytes, senders, rounds, timeout_s=TIMEOUT_S)[0]
            ratios = {name: seconds[name] / seconds["wsync"] for name in seconds}
            print(f"{TENSORS} x {tensor_nbytes >> 10} KiB, senders {senders}:", end=" ")
            print(", ".join(f"{name} {1e3 * seconds[name]:.1f} ms ({ratios[name]:.2f}x)" for name in seconds))


if __name__ == "__main__":
    main()
