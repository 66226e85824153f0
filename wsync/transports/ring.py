"""Sequence numbers, slots and who has released what: the arithmetic that transports with a ring share."""

import sys
import traceback

from wsync.errors import PeerError, ProtocolError
from wsync.plan import Bucket

MAX_TEXT = 1 << 16
"""Longest text, in characters, that a failing receiver sends; of a traceback the end is kept."""


class Ring:
    """Counts of one sender. Everything published has a sequence number; only some of it takes a slot.

    Attributes:
        published: sequence numbers given out so far.
        released: for each receiver, how many of them it has released, in order.
    """

    def __init__(self, slot_bytes: int, num_slots: int, receivers: int) -> None:
        self.published = 0
        self.released = [0] * receivers
        self._slot_bytes = slot_bytes
        self._last_use = [0] * num_slots
        self._slots_taken = 0
        self._acquired = False

    def acquire(self) -> tuple[int, int]:
        """The slot to fill next, and the count that every receiver must have released before that.

        Raises `ProtocolError` if there are no slots.
        """
        if not self._last_use:
            raise ProtocolError("this sender was made without slots: it hands over what the trainer has")
        slot = self._slots_taken % len(self._last_use)
        return slot, self._last_use[slot]

    def acquired(self) -> None:
        """The slot that `acquire` named is free and was given out."""
        self._acquired = True

    def commit(self, bucket: Bucket) -> int:
        """The sequence number of `bucket`, which lies in the acquired slot. Raises `ProtocolError` if none is."""
        if not self._acquired:
            raise ProtocolError(f"bucket {bucket.index} committed without acquiring a slot first")
        if bucket.nbytes > self._slot_bytes:
            raise ProtocolError(
                f"bucket {bucket.index} has {bucket.nbytes} bytes; a slot of this sender has {self._slot_bytes}"
            )
        self._acquired = False
        self._last_use[self._slots_taken % len(self._last_use)] = self.published + 1
        self._slots_taken += 1
        return self.hand_over()

    def hand_over(self) -> int:
        """A sequence number for something that takes no slot."""
        self.published += 1
        return self.published - 1

    def release(self, receiver: int, sequence: object) -> None:
        """Receiver `receiver` is done with `sequence`. Raises `ProtocolError` unless it is its next one."""
        expected = self.released[receiver]
        if sequence != expected or expected >= self.published:
            raise ProtocolError(
                f"receiver {receiver} released {sequence!r}; it has released {expected} of {self.published} so far"
            )
        self.released[receiver] += 1

    def behind(self, count: int) -> list[int]:
        """Receivers that have released fewer than `count`."""
        return [index for index, released in enumerate(self.released) if released < count]


def check_order(sequence: object, index: object, expected_sequence: int, expected: Bucket, slot_bytes: int) -> None:
    """Raises `ProtocolError` unless a commit frame names the next sequence number and the `expected` bucket."""
    if (sequence, index) != (expected_sequence, expected.index):
        raise ProtocolError(
            f"bucket {index!r} with number {sequence!r} arrived; bucket {expected.index} with number "
            f"{expected_sequence} was expected"
        )
    if expected.nbytes > slot_bytes:
        raise ProtocolError(f"bucket {expected.index} has {expected.nbytes} bytes; a slot has {slot_bytes}")


def failure_of(message: str) -> tuple[str, str]:
    """`message`, and the traceback of the exception that is being handled ("" if none), both bounded."""
    trace = traceback.format_exc() if sys.exc_info()[0] is not None else ""
    return message[:MAX_TEXT], trace[-MAX_TEXT:]


def failed(receiver: int, message: str, trace: str) -> PeerError:
    """What a sender raises when a receiver gave up."""
    return PeerError(f"receiver {receiver} failed: {message}", trace)
