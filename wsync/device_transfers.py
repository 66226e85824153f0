"""Tensors between trainer ranks whose shards are on CUDA devices: NCCL, in a communicator of wsync's own."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from wsync.background import Background
from wsync.deadline import Deadline
from wsync.device import uuid_of
from wsync.device_work import Events, queued, wait_for
from wsync.errors import ConfigError, ProtocolError, UnsupportedError
from wsync.transfers import LOOK_S, Messages
from wsync.transports.nccl import environment, make_key
from wsync.transports.nccl_communicator import Communicator, Span
from wsync.transports.nccl_environment import differences
from wsync.transports.nccl_library import KEY_BYTES, load

_WAITING_FOR = "trainer ranks to exchange their shards over NCCL"

Introduction = Mapping[str, Any]
"""What a rank tells all others about itself; msgpack-able."""


def introduce(device: torch.device) -> Introduction:
    """This rank, whose shards are on `device`.

    Raises `UnsupportedError` without NCCL or CUDA device, `ConfigError` if the environment makes NCCL block.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"shards on {device} and on other ranks' CUDA devices cannot be gathered together")
    load()
    return {"device": uuid_of(device), "environment": dict(environment())}


def invite(rank: int, device: torch.device) -> Introduction:
    """The same with what all ranks need to form a communicator, which rank 0 has. Raises `TransportError`, too."""
    return {**introduce(device), "key": make_key() if rank == 0 else b""}


def compare(introductions: Sequence[Introduction]) -> None:
    """Raises `ConfigError` if no communicator of these ranks would work. All of them come to the same."""
    first = introductions[0]["environment"]
    holders: dict[object, int] = {}
    for rank, one in enumerate(introductions):
        other = holders.setdefault(one["device"], rank)
        if other != rank:
            raise ConfigError(
                f"trainer ranks {other} and {rank} have their shards on one device, {one['device']}: NCCL takes every "
                f"device once"
            )
        if unlike := differences(first, one["environment"], "at trainer rank 0", f"at trainer rank {rank}"):
            raise ConfigError(
                f"{'; '.join(unlike)}. NCCL would wait for ever between ranks that differ in this: start all with the "
                f"same"
            )


class DeviceTransfers:
    """See `Transfers`. All of it is work on the current stream, and nothing here waits for the device but `settle`."""

    def __init__(
        self,
        invitations: Sequence[Introduction],
        rank: int,
        device: torch.device,
        check: Callable[[], None],
        listen: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        """*Collective.* Form the communicator.

        Args:
            invitations: of all ranks.
            rank: this one.
            device: of its shards.
            check: called wherever other ranks are waited for; raises if one of them is gone. It is kept for as long as
                the communicator lives.
            listen: raises if a rank has failed that lives; it takes longer, and is called now and then.
            deadline: for all ranks to be here.

        Raises:
            ConfigError: as `compare`.
            ProtocolError: rank 0 gave no key of NCCL's.
            TransportError, SyncTimeout, and what `check` raises: the communicator was not formed; nothing is left.
        """
        compare(invitations)
        key = invitations[0]["key"]
        if len(key) != KEY_BYTES:
            raise ProtocolError("trainer rank 0 posted no key of NCCL's")
        self._device, self._watch = device, _Watch(check, listen, deadline)
        self._last: Events = ()
        with torch.cuda.device(device):
            self._communicator = Communicator(load(), key, rank, len(invitations), self._watch)
        weakref.finalize(self, _leave, self._communicator).atexit = False

    def run(self, sends: Messages, receives: Messages, deadline: Deadline) -> None:
        """See `Transfers`. Queued when this returns."""
        self._watch.start(deadline)
        self._communicator.look()
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._communicator.exchange(_spans(sends), _spans(receives), stream)
            self._last = queued([self._device])

    def settle(self, deadline: Deadline) -> None:
        """See `Transfers`."""
        self._watch.start(deadline)
        wait_for(self._last, deadline, self._look, _WAITING_FOR)
        self._last = ()

    def close(self) -> None:
        """See `Transfers`. The device's memory is given back."""
        self._communicator.abort()

    def _look(self) -> None:
        self._communicator.look()
        self._watch()


class _Watch:
    """What ends a wait for other ranks."""

    def __init__(self, check: Callable[[], None], listen: Callable[[], None], deadline: Deadline) -> None:
        self._check, self._listen = check, listen
        self.start(deadline)

    def start(self, deadline: Deadline) -> None:
        """A wait begins."""
        self._deadline, self._next_look = deadline, time.monotonic() + LOOK_S

    def __call__(self) -> None:
        self._check()
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._listen()
        self._deadline.remaining(_WAITING_FOR)


def _leave(communicator: Communicator) -> None:
    """Whoever collects garbage shall not wait for the device."""
    Background("NCCL to end a communicator", communicator.abort)


def _spans(messages: Messages) -> Sequence[Span]:
    return [(peer, tensor.data_ptr(), tensor.nbytes) for peer, tensor in messages if tensor.numel()]
