"""Groups of NCCL, for slots on CUDA devices."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from wsync.deadline import Deadline
from wsync.device import uuid_of
from wsync.errors import ConfigError, ProtocolError, TransportError, UnsupportedError
from wsync.topology import Topology
from wsync.transports.collective_group import Fact, Seat, allocate
from wsync.transports.device_slots import DeviceSlots
from wsync.transports.nccl_communicator import Communicator
from wsync.transports.nccl_environment import differences, fingerprint, forced_to_block
from wsync.transports.nccl_library import KEY_BYTES, SUCCESS, load
from wsync.transports.slots import SlotMemory

_KEY = "key"


class NcclBackend:
    """See `Backend`. Every rank has a device of its own."""

    def refuse(self, topology: Topology) -> str | None:
        """See `Backend`."""
        if not dist.is_available() or not dist.is_nccl_available():
            return "this build of torch has no nccl"
        sender, workers = topology.sender, topology.receivers
        for end in (sender, *workers):
            if not end.device.startswith("cuda:"):
                return f"nccl moves tensors between CUDA devices, and this is not one: {end}"
        if any(worker.device == sender.device for worker in workers):
            return (
                f"the trainer and a worker are both on {sender.device}: NCCL takes every device once; cuda_ipc is "
                f"for processes that share one"
            )
        [(device, times)] = Counter(worker.device for worker in workers).most_common(1)
        if times > 1:
            return f"{times} workers are on {device}: NCCL takes every device once"
        try:
            load()
        except UnsupportedError as error:
            return str(error)
        return None

    def facts(self, device: torch.device) -> Sequence[Fact]:
        """See `Backend`. The device, and a fingerprint as "name=value"."""
        if device.type != "cuda":
            raise UnsupportedError(f"nccl moves tensors between CUDA devices; the trainer's weights are on {device}")
        return (uuid_of(device), *(f"{name}={value}" for name, value in environment().items()))

    def compare(self, facts: Sequence[Fact]) -> None:
        """See `Backend`. Names what differs, with both values."""
        uuid, *pairs = [str(fact) for fact in facts] or [""]
        there = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
        if unlike := differences(environment(), there, "here", "at the sender"):
            raise ConfigError(
                f"{'; '.join(unlike)}. NCCL would wait for ever between processes that differ in this: start both "
                f"with the same"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        if uuid == uuid_of(device):
            raise ConfigError(f"{device} here and the sender's device are one, {uuid}: NCCL takes every device once")

    def memory(self, slot_bytes: int, num_slots: int, device: torch.device | None) -> DeviceSlots:
        """See `Backend`."""
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        return DeviceSlots(allocate(slot_bytes, num_slots, device), device)

    def form(self, seat: Seat, memory: SlotMemory, check: Callable[[], None]) -> "_Group":
        """See `Backend`. Raises `ProtocolError` if the sender posts no key of NCCL's."""
        assert isinstance(memory, DeviceSlots)
        torch.cuda.set_device(memory.stream.device)  # of this thread only, which is the mover's own
        return _Group(Communicator(load(), meet(seat, check), seat.rank, seat.size, check), memory)


def meet(seat: Seat, check: Callable[[], None]) -> bytes:
    """The key of a communicator, which rank 0 makes for all."""
    if seat.rank == 0:
        seat.board.post(_KEY, make_key())
    key = seat.board.read(_KEY, Deadline.after(seat.timeout_s), check)
    if len(key) != KEY_BYTES:
        raise ProtocolError("the sender posted no key of NCCL's")
    return key


class _Group:
    """See `Group`. Ordered by events, so that the host may be ahead of the device."""

    def __init__(self, communicator: Communicator, memory: DeviceSlots) -> None:
        self._communicator, self._memory = communicator, memory

    def start(self, slot: int, tensor: torch.Tensor) -> Callable[[], bool]:
        memory = self._memory
        memory.before_move(slot)
        self._communicator.broadcast(tensor.data_ptr(), tensor.numel(), memory.stream.cuda_stream)
        return partial(self._ended, memory.after_move(slot))

    def close(self) -> None:
        self._communicator.abort()

    def _ended(self, event: Any) -> bool:
        if event.query():
            return True
        self._communicator.look()
        return False


def make_key() -> bytes:
    """A communicator's, to be told to all of its ranks. Raises `TransportError`."""
    code, key = load().make_key()
    if code != SUCCESS:
        raise TransportError(f"NCCL: no rank can be invited: {load().words(code, 0)}")
    return key


def environment() -> Mapping[str, str]:
    """What ranks must have in common. Raises `ConfigError` if communicators of this process would block."""
    if forced_to_block():
        raise ConfigError("NCCL_COMM_BLOCKING is 1: a communicator that blocks cannot be given up; leave it unset")
    return fingerprint(load().version())
