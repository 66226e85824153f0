"""Host memory of this process: how much it takes, and giving back what the C library keeps of it."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def resident_bytes() -> int:
    """Bytes of host memory that this process has now, its resident set: heap, pinned and shared pages, mapped files."""
    pages = int((PROC / "self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def trim() -> None:
    """Hand freed memory on to whoever needs it. Does nothing with a C library other than glibc."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
