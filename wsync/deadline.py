"""A point in time after which a wait is over."""

import time
from dataclasses import dataclass

from wsync.errors import SyncTimeout

FOREVER_S = 1e9
"""For waits that only the other side's death ends."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Made once where a user's patience is known, handed down to every wait below it."""

    timeout_s: float
    expires: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        """A deadline `timeout_s` seconds from now."""
        return cls(timeout_s, time.monotonic() + timeout_s)

    @classmethod
    def beyond(cls, timeout_s: float) -> "Deadline":
        """For waiting on somebody who may first wait `timeout_s` himself: a tenth and five seconds more."""
        return cls.after(1.1 * timeout_s + 5.0)

    def restart(self) -> "Deadline":
        """The same patience, counted from now."""
        return Deadline.after(self.timeout_s)

    def remaining(self, waiting_for: str) -> float:
        """Seconds left, more than zero. Raises `SyncTimeout` saying `waiting_for` if there are none."""
        left = self.expires - time.monotonic()
        if left <= 0:
            raise SyncTimeout(f"gave up after {self.timeout_s:g} s: still waiting for {waiting_for}")
        return left
