"""Every error that wsync raises on purpose.

    WsyncError
    ├── ConfigError (ValueError)        the call or the configuration is wrong; nothing was moved
    ├── UnsupportedError (TypeError)    nothing here can do that; lists what was seen and what is supported
    ├── MismatchError (ValueError)      trainer and engine disagree about names, shapes, dtypes or coverage
    ├── EngineStateError                the engine is asleep, updating or torn and must not do that now
    ├── MemoryStateError                a model, optimizer or tag is on the device, or away, and must not be for that
    ├── AdmissionError (MemoryError)    there is too little memory for what comes next; nothing was moved
    ├── TransportError                  bytes did not arrive
    │   └── PeerError                   the other process died or reported a failure; `remote_traceback` has its words
    ├── RankError                       another trainer rank failed or never came; `ranks` names them
    ├── SyncTimeout (TimeoutError)      a deadline passed; the message says what was waited for
    ├── DigestError                     bytes arrived, and they are not the bytes that were sent
    ├── ProtocolError                   a control frame is malformed, too large or out of order
    └── ClosedError                     you closed this session, sender or receiver

A message says what happened, where (tensor, rank, phase), numbers with units, and what to do.
"""

from collections.abc import Sequence


class WsyncError(Exception):
    """Base of every error that wsync raises on purpose."""


class ConfigError(WsyncError, ValueError):
    """The call or the configuration is wrong. Raised before anything is moved."""


class UnsupportedError(WsyncError, TypeError):
    """No adapter or transport can serve this. The message lists what was seen and what is supported."""


class MismatchError(WsyncError, ValueError):
    """Trainer and engine disagree about names, shapes, dtypes or coverage. Raised before a byte is written.

    Only where a plain module got other parameters since the last sync, while something keeps the old ones alive, is
    that seen when these have been written: then the engine is torn.
    """


class EngineStateError(WsyncError, RuntimeError):
    """The engine's state forbids the operation: asleep, updating, or torn by a failed sync."""


class MemoryStateError(WsyncError, RuntimeError):
    """Something is on the device, or away from it, and must not be for what was asked. Nothing was moved."""


class AdmissionError(WsyncError, MemoryError):
    """There is too little memory for what comes next: what it needs, what is free, and what holds the rest."""


class TransportError(WsyncError, RuntimeError):
    """Bytes did not arrive. The engine is torn if any of them had been loaded."""


class PeerError(TransportError):
    """The process on the other side died or reported a failure.

    Attributes:
        remote_traceback: the other side's traceback as text, or "" if it died without a word.
    """

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\nremote traceback:\n{self.remote_traceback}" if self.remote_traceback else message


class RankError(WsyncError, RuntimeError):
    """Another trainer rank failed, or did not call within the deadline.

    Attributes:
        ranks: the trainer ranks at fault.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class SyncTimeout(WsyncError, TimeoutError):
    """A deadline passed. The message says what was waited for and for how long."""


class DigestError(WsyncError, RuntimeError):
    """Bytes arrived, and their digest is not the sender's. The engine is torn."""


class ProtocolError(WsyncError, RuntimeError):
    """A control frame is malformed, larger than its bound, or out of order."""


class ClosedError(WsyncError, RuntimeError):
    """The session, sender or receiver was closed by its owner."""


def first_five(items: Sequence[str]) -> str:
    """`items` for an error message: the first five, and how many more there are."""
    shown = ", ".join(items[:5])
    return shown if len(items) <= 5 else f"{shown} and {len(items) - 5} more"
