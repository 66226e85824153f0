"""How weights are moved today: a collective, a message or a call for each parameter, and nothing at the same time.

Written from what trainers do, not from their code. Each loop is kept as cheap as it can be: control messages go over a
pipe between two processes, where trainers use HTTP or Ray, and no loop checks anything.

    broadcast each   gather one parameter, say its name, shape and dtype, broadcast it, wait until it is loaded
                     (TRL with a server, OpenRLHF)
    message each     the same, with the bytes in the message (LightRFT with vLLM)
    load each        gather one parameter and call the engine's loader with it (TRL in one process)
    gather each      the export alone: full tensors one by one, which are then dropped
"""

from collections.abc import Mapping
from functools import partial

import torch

from wsync.bench.actors import Trained
from wsync.bench.host import Neighbour
from wsync.bench.receiver import BareEngine
from wsync.bench.samples import Way

Receiver = Neighbour | BareEngine | None
"""What a rank knows of the engine; None on ranks that only help to gather."""


def loops_for(trained: Trained, receiver: Receiver, remote: bool, dtype: torch.dtype) -> Mapping[str, Way]:
    """*Collective* ways, the same names on every rank.

    Args:
        trained: the weights.
        receiver: on rank 0.
        remote: whether the engine is in another process.
        dtype: what the engine wants.
    """
    found: dict[str, Way] = {}
    for suffix, first in [("", False), *([(", cast first", True)] if trained.kind == "fsdp2" else [])]:
        send = _broadcast_each if remote else _load_each
        found[f"{'broadcast' if remote else 'load'} each{suffix}"] = partial(send, trained, receiver, dtype, first)
        if trained.kind == "fsdp2":
            found[f"gather each{suffix}"] = partial(_drain, trained, dtype, first)
    if remote:
        found["message each"] = partial(_message_each, trained, receiver, dtype)
    return found


def _broadcast_each(trained: Trained, receiver: Receiver, dtype: torch.dtype, first: bool) -> None:
    if isinstance(receiver, Neighbour):
        receiver.broadcast_each(trained.full_tensors(dtype, cast_first=first))
    else:
        _drain(trained, dtype, first)


def _message_each(trained: Trained, receiver: Receiver, dtype: torch.dtype) -> None:
    if isinstance(receiver, Neighbour):
        receiver.message_each(trained.full_tensors(dtype))
    else:
        _drain(trained, dtype, False)


def _load_each(trained: Trained, receiver: Receiver, dtype: torch.dtype, first: bool) -> None:
    for pair in trained.full_tensors(dtype, cast_first=first):
        if isinstance(receiver, BareEngine):
            receiver.loader.load_weights([pair])


def _drain(trained: Trained, dtype: torch.dtype, first: bool) -> None:
    for _ in trained.full_tensors(dtype, cast_first=first):
        pass
