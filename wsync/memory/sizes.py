"""Bytes for people."""

GIB = 1 << 30
_UNITS = (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10))


def gib(nbytes: int) -> str:
    """ "14.2 GiB", or in a smaller unit what is less than one."""
    for unit, size in _UNITS:
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
