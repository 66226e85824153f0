"""Optional libraries: imported where they are needed, and a missing one is an error that says what to install."""

from collections.abc import Iterator
from contextlib import contextmanager

from wsync.errors import UnsupportedError


@contextmanager
def importing(extra: str, what: str) -> Iterator[None]:
    """Context for imports that the extra `extra` of this distribution brings.

    Args:
        extra: its name, "hf" say.
        what: what needs them, for the message.

    Raises `UnsupportedError` with the exact pip command if one of them is missing or too old.
    """
    try:
        yield
    except ImportError as error:
        cure = f"pip install 'wsync-rl[{extra}]'"
        raise UnsupportedError(f"{what} cannot import what it needs: {error}; {cure}") from error
