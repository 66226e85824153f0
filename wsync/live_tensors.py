"""The bytes of a live parameter or buffer, asked of every worker piece by piece."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from wsync.plan import from_bytes

_READ_BYTES = 32 << 20
"""Most bytes of a tensor in one answer."""


def read_live(ask: Callable[[Mapping[str, object]], Sequence[Mapping[str, Any]]], name: str) -> Sequence[torch.Tensor]:
    """The tensor that the engine calls `name`, of each worker, on the host. `ask` sends `read` to all workers."""
    parts: list[list[bytes]] = []
    start = 0
    while True:
        replies = ask({"name": name, "start": start, "count": _READ_BYTES})
        parts.append([reply["data"] for reply in replies])
        start += _READ_BYTES
        if all(start >= reply["nbytes"] for reply in replies):
            break
    whole = [bytearray(b"".join(pieces)) for pieces in zip(*parts, strict=True)]
    return [from_bytes(data, reply["dtype"], reply["shape"]) for data, reply in zip(whole, replies, strict=True)]
