"""Whether an engine generates, as something that leaves and comes back: by a pause, and by going on."""

from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.memory.resident import require_away, require_present
from wsync.protocols import Engine


class Generation:
    """What an engine with devices of its own does between syncs. Takes no memory. Meets `wsync.memory.Resident`.

    Requests must be over, or frozen, before the KV cache that they are in can leave.
    """

    nbytes = 0
    host_nbytes = 0

    def __init__(self, engine: Engine, prefix: str, mode: PauseMode) -> None:
        """Args:
        engine: whose.
        prefix: of the name.
        mode: what happens to requests in flight.
        """
        self.name = f"{prefix} generation"
        self._engine, self._mode = engine, mode
        self.present = True
        """Whether this did not pause it."""

    def check_release(self) -> None:
        """Nothing to check: after an error the engine goes on."""

    def check_restore(self) -> None:
        """Nothing to check: what the engine refuses it refuses by itself, and stays paused."""

    def release(self, deadline: Deadline) -> None:
        """Pause. Raises as `Engine.pause`."""
        require_present(self)
        self._engine.pause(self._mode, deadline)
        self.present = False

    def restore(self, deadline: Deadline) -> None:
        """Go on. Raises `EngineStateError` if the engine is torn: a complete sync must come first."""
        require_away(self)
        self._engine.resume()
        self.present = True
