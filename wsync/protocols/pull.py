"""What producers and engines have beyond their contracts if weights can be pulled."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from wsync.deadline import Deadline
from wsync.plan import Bucket
from wsync.protocols.engine import Engine
from wsync.protocols.producer import Producer
from wsync.pull.exports import Export, Probe, Shares


@runtime_checkable
class ExportingProducer(Producer, Protocol):
    """A producer whose tensors lie in memory as the engine is to have them, if perhaps in parts."""

    def exposes(self, name: str) -> bool:
        """Whether this rank's part of the tensor `name` can be read where it lies. Asked after `metadata`."""
        ...

    def shares(self, bucket: Bucket) -> Shares:
        """Where this rank's parts of `bucket` lie. Between `open` and `close` only; valid until then."""
        ...


@runtime_checkable
class PullingEngine(Engine, Protocol):
    """An engine whose workers read the memory of trainer ranks."""

    read_seconds: float
    """What the copies of the version that was published last took, of the slowest worker."""

    def probe(self, probes: Sequence[Probe], deadline: Deadline) -> Sequence[str]:
        """For each worker why it cannot read the ranks' memory, "" if it can."""
        ...

    def take_exports(self, exports: Sequence[Export], address: str, deadline: Deadline) -> float:
        """Where the pulled bucket lies of the plan attached with the ticket of `address`, from now on.

        Read in every attempt that begins afterwards. Returns the seconds that the slowest worker took to map it. Raises
        `PeerError` if a worker cannot map it, or has nothing attached or what another session attached.
        """
        ...
