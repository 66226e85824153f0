"""Replies of workers: opened, or raised as what went wrong over there."""

from collections.abc import Mapping
from typing import Any, cast

from wsync import wire
from wsync.errors import PeerError, ProtocolError


def open_reply(data: bytes, engine: str, rank: int, method: str) -> Mapping[str, Any]:
    """What worker `rank` of `engine` answered to `method`.

    Raises `PeerError` with its traceback if it failed, `ProtocolError` if that is no answer.
    """
    reply = wire.unpack(data)
    if not isinstance(reply, dict):
        raise ProtocolError(f"worker {rank} of {engine} answered {method!r} with {type(reply).__name__}")
    if "error" in reply:
        error = cast("Mapping[str, str]", reply["error"])
        raise PeerError(
            f"worker {rank} of {engine} failed in {method!r}: {error['type']}: {error['message']}", error["traceback"]
        )
    return cast("Mapping[str, Any]", reply["ok"])


def first_line(words: object) -> str:
    """Without the remote traceback that may follow."""
    return str(words).partition("\n")[0]
