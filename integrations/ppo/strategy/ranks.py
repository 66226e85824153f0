"""Numbers, items and data over the ranks of a run."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from integrations.ppo import conflicts
from integrations.ppo.arguments import Arguments

T = TypeVar("T")
Op = Literal["mean", "sum", "max"]


class Ranks:
    """This rank among all of them. Methods that are marked *collective* are called by every rank, in the same order."""

    def __init__(self, args: Arguments) -> None:
        """The default process group is there. Raises `ConflictError` if `args` do not fit the number of ranks."""
        conflicts.check_world(args, dist.get_world_size())
        self.args = args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def print(self, *words: object) -> None:
        """Print on rank 0."""
        if self.is_rank_0:
            print(*words, flush=True)

    def all_reduce(self, numbers: Mapping[str, float] | torch.Tensor | float, op: Op = "mean") -> Any:
        """*Collective.* A tensor, a number, or numbers by name, over all ranks: the same type as was given."""
        if op not in get_args(Op):
            raise ValueError(f"all_reduce knows {', '.join(get_args(Op))}, and no {op!r}")
        if isinstance(numbers, float | int):
            return self.all_reduce({"": numbers}, op)[""]
        if isinstance(numbers, Mapping):
            values = torch.tensor([numbers[name] for name in sorted(numbers)], dtype=torch.float64)
            reduced = self.all_reduce(values, op)
            return dict(zip(sorted(numbers), reduced.tolist(), strict=True))
        result = numbers.detach().clone().to(self.device)
        dist.all_reduce(result, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return result / self.world_size if op == "mean" else result

    def all_gather(self, item: T) -> list[T]:
        """*Collective.* What each rank passed, in their order."""
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def evened(self, batches: Sequence[T], filler: T) -> list[T]:
        """*Collective.* `batches`, and as many fillers after them as the rank with the most has more.

        A forward of a sharded model is collective: all ranks make the same number of them.
        """
        rounds = int(self.all_reduce(torch.tensor(len(batches)), "max"))
        return [*batches, *[filler] * (rounds - len(batches))]

    def setup_dataloader(self, dataset: "Dataset[T]", batch_size: int, *, shuffle: bool) -> "DataLoader[T]":
        """Each rank's part of `dataset`, in lists of `batch_size`. What fills no batch on every rank is left out."""
        sampler: DistributedSampler[T] = DistributedSampler(
            dataset, self.world_size, self.rank, shuffle=shuffle, seed=self.args.seed, drop_last=True
        )
        return DataLoader(dataset, batch_size, sampler=sampler, drop_last=True, collate_fn=list)


_CPU = torch.device("cpu")
