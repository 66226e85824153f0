"""Where numbers go: a progress bar, lines of JSON, TensorBoard, pictures, lines about memory. On rank 0 alone."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from integrations.ppo.plots import length_histogram
from wsync.memory.ledger import Ledger
from wsync.memory.timeline import plot

SHOWN = ("reward", "kl", "eval_reward")


class Monitor:
    """A context; without `active` it takes numbers and does nothing with them."""

    def __init__(self, log_dir: str, steps: int, *, active: bool) -> None:
        """`steps` is where the progress bar ends. Nothing is written without a `log_dir`."""
        self._folder = Path(log_dir) if log_dir and active else None
        columns = (
            TextColumn("iteration"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, disable=not active)
        self._task = self._progress.add_task("", total=steps)

    def __enter__(self) -> "Monitor":
        self._progress.start()
        if self._folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._folder.mkdir(parents=True, exist_ok=True)
            self._lines = (self._folder / "metrics.jsonl").open("a")
            self._board = SummaryWriter(str(self._folder))
        return self

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of iteration `step`."""
        shown = "  ".join(f"{name} {numbers[name]:.3f}" for name in SHOWN if name in numbers)
        self._progress.update(self._task, completed=step, description=shown)
        if self._folder is None:
            return
        self._lines.write(json.dumps({"step": step, **numbers}) + "\n")
        self._lines.flush()
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)

    def lengths(self, step: int, lengths: Sequence[int], longest: int) -> None:
        """How long the answers of all ranks were, in tokens; `longest` is the most that one may have."""
        if self._folder is not None:
            length_histogram(lengths, longest, self._folder / "lengths" / f"step_{step:06d}.png")

    def memory(self, line: str) -> None:
        """One line about what is on the device."""
        if self._folder is not None:
            with (self._folder / "memory.log").open("a") as file:
                file.write(f"{line}\n")

    def ledger(self, ledger: Ledger) -> None:
        """Memory over time, as JSON and as a picture, in place of those from before."""
        if self._folder is not None:
            ledger.write_json(self._folder / "memory.json")
            plot(ledger, self._folder / "memory.png")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._folder is not None:
            self._lines.close()
            self._board.close()
