"""Places in the loop where a trainer may do something."""


class Hooks:
    """Those that a trainer need not have. Every rank calls each of them; a hook may be collective."""

    def on_init_end(self) -> None:
        """All is set up; the engine sleeps, and has the actor's weights when it wakes."""

    def on_train_begin(self) -> None:
        """Before the first iteration."""

    def on_train_end(self) -> None:
        """After the last one."""

    def on_validate_begin(self) -> None:
        """Before an evaluation generates."""

    def on_validate_end(self) -> None:
        """After an evaluation was scored."""

    def on_step_begin(self) -> None:
        """Before an iteration."""

    def on_sample_begin(self) -> None:
        """Before an iteration generates."""
