"""The way from one set of residents to another, as data: what leaves, then what comes."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["release", "empty cache", "restore"]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is done, on every rank at the same time."""

    action: Action
    resident: str = ""
    """Its name; "" for the cache."""

    def __str__(self) -> str:
        return f"{self.action} {self.resident}".rstrip()


def transition(
    wanted: Sequence[str],
    *,
    present: Collection[str],
    absent: Collection[str],
    together: Sequence[Sequence[str]] = (),
    order: Sequence[str],
) -> tuple[Step, ...]:
    """Steps after which just `wanted` is present. Everything leaves before anything comes.

    Args:
        wanted: residents of the new phase, in the order in which they come.
        present: residents that are on the device on some rank.
        absent: residents that are away on some rank. One that is in both is where an earlier way broke off.
        together: residents that can only leave together: if one of them must, all of them do, and those that are
            wanted come back.
        order: all residents, in the order in which they leave.
    """
    leaving = set(present) - set(wanted)
    for some in together:
        if leaving & set(some):
            leaving |= set(some) & set(present)
    coming = [name for name in wanted if name in absent or name in leaving]
    return tuple(_steps([name for name in order if name in leaving], coming))


def _steps(leaving: Sequence[str], coming: Sequence[str]) -> Iterator[Step]:
    for name in leaving:
        yield Step("release", name)
    if leaving:
        yield Step("empty cache")
    for name in coming:
        yield Step("restore", name)
