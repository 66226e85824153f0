"""Host memory: how much there is, how much this process takes, and giving back what the C library keeps of it."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def resident_bytes() -> int:
    """Bytes of host memory that this process has now, its resident set: heap, pinned and shared pages, mapped files."""
    pages = int((PROC / "self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def proc_sizes(name: str) -> dict[str, int]:
    """Those lines of a file in /proc that give a size: name -> bytes."""
    lines = (line.split() for line in (PROC / name).read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) << 10 for line in lines if line[2:] == ["kB"]}


def available_bytes() -> int | None:
    """Bytes of host memory that can be taken without swapping; None where the system does not say."""
    try:
        return proc_sizes("meminfo").get("MemAvailable")
    except OSError:
        return None


def trim() -> None:
    """Hand freed memory on to whoever needs it. Does nothing with a C library other than glibc."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
