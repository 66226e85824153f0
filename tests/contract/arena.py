"""Memory that processes of one host can map, standing in for device memory: tensors in it are handed over in place."""

import mmap
import os
from collections.abc import Sequence

import torch

from wsync.errors import TransportError
from wsync.topology import CPU
from wsync.transports.listener import Listener, Welcome, listen_here
from wsync.transports.memfd import create_slots
from wsync.transports.references import Segment
from wsync.transports.ring import Ring
from wsync.transports.shm import ShmTransport
from wsync.transports.slots import SlotMemory, SlotReceiver, SlotSender

_live: dict[str, "Arena"] = {}


class Arena:
    """One allocation, which tensors are put into."""

    def __init__(self, nbytes: int) -> None:
        self._fd, [self.memory] = create_slots(nbytes, 1)
        self.segment = Segment(f"/proc/{os.getpid()}/fd/{self._fd}", self.memory.data_ptr(), nbytes)
        self._used = 0
        _live[self.segment.key] = self

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in the arena."""
        start = -(-self._used // 64) * 64
        self._used = start + tensor.nbytes
        view = self.memory[start : self._used].view(tensor.dtype).view(tensor.shape)
        return view.copy_(tensor)

    def close(self) -> None:
        """Nobody can map it any more."""
        if _live.pop(self.segment.key, None) is not None:
            os.close(self._fd)


class _Exporter:
    def segments(self, starts: Sequence[int]) -> Sequence[Segment]:
        return [self._segment(start) for start in starts]

    def intact(self, segments: Sequence[Segment]) -> bool:
        return all(segment.key in _live for segment in segments)

    @staticmethod
    def _segment(start: int) -> Segment:
        for arena in _live.values():
            if arena.segment.start <= start < arena.segment.start + arena.segment.nbytes:
                return arena.segment
        raise TransportError(f"{start:#x} is in no arena")


class _Importer:
    def open(self, key: str, nbytes: int) -> torch.Tensor:
        fd = os.open(key, os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(fd, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE), dtype=torch.uint8)[
                :nbytes
            ]
        finally:
            os.close(fd)


class ArenaTransport(ShmTransport):
    """Shared memory that also hands over what lies in an `Arena`."""

    def refuse_references(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Whatever lies outside."""
        try:
            _Exporter().segments([tensor.data_ptr() for tensor in tensors])
        except TransportError as error:
            return str(error)
        return None

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> SlotSender:
        fd, slots = create_slots(max(slot_bytes, 1), max(num_slots, 1))
        listener = Listener(*listen_here(self.name, generation), receivers)
        welcome = Welcome(facts=(max(slot_bytes, 1), max(num_slots, 1)), fd=fd)
        return SlotSender(listener, Ring(slot_bytes, num_slots, receivers), welcome, SlotMemory(slots), _Exporter())

    def receiver(self, *args: object, **kwargs: object) -> SlotReceiver:
        plain = super().receiver(*args, **kwargs)  # type: ignore[arg-type]
        plain._closed = True  # its link and its memory live on in the other
        return SlotReceiver(plain._link, plain._memory, _Importer())
