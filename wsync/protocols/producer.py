"""The contract of a trainer: what one of its ranks holds, bucket by bucket."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from wsync.plan import Bucket, Plan, TensorSpec

if TYPE_CHECKING:
    from wsync.group import Group


@runtime_checkable
class Producer(Protocol):
    """The trainer side of the data path, on one trainer rank.

    Methods marked *collective* are called by every trainer rank in the same order. The weights must not change from
    `open` until `close`.
    """

    @property
    def staging_bytes(self) -> int:
        """Scratch memory, in bytes, that this producer holds from one sync to the next."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank's weights are, once `metadata` was called. Slots are best there too."""
        ...

    def metadata(self) -> Sequence[TensorSpec]:
        """What this rank holds: the same names, shapes and dtypes on every rank, this rank's `owners` only.

        Local: no communication. Raises `UnsupportedError` naming the parameter that cannot be exported.
        """
        ...

    def prepare(self, plan: Plan, senders: Sequence[int], group: "Group") -> None:
        """Take the plan. `senders` are the trainer ranks whose `fill` gets a slot. Once per plan.

        Every rank calls it in the same order and hears if another one failed, so that it may hold rounds on `group`.
        """
        ...

    def open(self) -> None:
        """Look the parameters up afresh. Raises `MismatchError` if they no longer fit `metadata()` as first given.

        As in `prepare`, ranks may exchange something small; each first says whether it can.
        """
        ...

    def references(self, bucket: Bucket) -> Sequence[torch.Tensor] | None:
        """The bucket's tensors where they lie, one per `bucket.tensors`, if each lies whole in this process.

        A chunk is its elements, 1-D. They may have the trainer's dtype instead of the wire dtype. None: only `fill`
        can serve this bucket. The answer (None or not) is the same on every rank.
        """
        ...

    def confirm(self) -> bool:
        """Whether what was looked up at `open` is what the trainer holds; asked while the last bytes are read.

        `open` delays every sync and may trust that what was there is still in use. Where that was wrong the sync is
        done once more, and its `open` has to look closely. True for a producer that always does.
        """
        ...

    def stage(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """Do everything local for `bucket` that may fail: peers are not yet waiting.

        Casts and copies this rank's own parts into `slot` (uint8, at least `bucket.nbytes`; None where not sending),
        and packs what other ranks need.
        """
        ...

    def fill(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """*Collective.* Bring the other ranks' parts into the `slot` that `stage` was given. Transfers only.

        Uses wsync's own group only. When it returns, all bytes of the bucket are in `slot`.
        """
        ...

    def digests(self, names: Sequence[str]) -> Sequence[int]:
        """This rank's share of each tensor's digest over wire bytes; shares of all ranks add up modulo 2**64.

        A part held by several ranks is counted by its first owner only.
        """
        ...

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """*Collective, lazy.* Each (engine-side name, full tensor in the trainer's dtype); every rank must drain it.

        Between `open` and `close` only. Raises `ProtocolError` at the call if the producer is not open.
        """
        ...

    def close(self) -> None:
        """Drop every reference to the parameters."""
        ...
