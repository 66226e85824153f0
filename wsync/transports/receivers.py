"""A sender's receivers: their links, what they say, and which of them are gone."""

from collections.abc import Callable, Collection, Mapping

from wsync.deadline import Deadline
from wsync.errors import PeerError, ProtocolError, SyncTimeout
from wsync.transports.link import Link
from wsync.transports.listener import Listener, Welcome
from wsync.transports.ring import failed


class Receivers:
    """Links by receiver. Whoever owns it guards it.

    Attributes:
        links: of everybody who was admitted, also of those that are gone.
        gone: receiver -> why nothing more will come from it.
    """

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}
        self.gone: dict[int, str] = {}
        self._failure: tuple[int, str, str] | None = None

    @property
    def lost(self) -> bool:
        """Whether any of them failed or is gone."""
        return bool(self.gone) or self._failure is not None

    def speaking(self) -> list[Link]:
        """Links of those that are not gone."""
        return [link for index, link in self.links.items() if index not in self.gone]

    def admit(self, listener: Listener, welcome: Welcome) -> None:
        """Let in whoever has proven himself, without waiting."""
        for index, link in listener.admit(welcome):
            self.links[index] = link

    def hear(self, take: Callable[[int, tuple[object, ...]], None], closed: Callable[[], bool]) -> None:
        """Take in what they have said, without waiting, until `closed()`.

        `take` gets (receiver, frame) of all but failures; if it raises `ProtocolError`, that receiver counts as gone.
        """
        for index, link in self.links.items():
            try:
                while not closed() and index not in self.gone and (frame := link.receive()) is not None:
                    match frame:
                        case ("fail", str(message), str(trace)):
                            self._failure = self._failure or (index, message, trace)
                        case _:
                            take(index, frame)
            except (PeerError, ProtocolError) as error:
                self.gone[index] = str(error)

    def tell(self, frame: tuple[object, ...], deadline: Deadline) -> Mapping[int, str]:
        """Send a frame to all of them. Receiver -> why it did not get there; its last words may lie unread."""
        lost = {}
        for index, link in self.links.items():
            try:
                link.send(frame, deadline)
            except (PeerError, SyncTimeout) as error:
                lost[index] = str(error)
        return lost

    def lose(self, lost: Mapping[int, str]) -> None:
        """These are gone, unless they said why themselves."""
        self.gone = {**lost, **self.gone}

    def check(self, alive: Collection[int]) -> None:
        """Raises `PeerError` if any of them failed, or one of `alive` is gone."""
        if self._failure is not None:
            raise failed(*self._failure)
        gone = [self.gone[index] for index in sorted(set(alive).intersection(self.gone))]
        if gone:
            raise PeerError("; ".join(gone))


def unknown(index: int, frame: tuple[object, ...]) -> ProtocolError:
    """For a frame that no receiver sends."""
    return ProtocolError(f"receiver {index} sent an unknown frame {str(frame[0])[:20]!r}")
