"""Whether what comes next will fit, from what is known and what is measured, before anything moves."""

from collections.abc import Mapping, Sequence

from wsync.errors import AdmissionError
from wsync.memory.device import Device
from wsync.memory.sizes import gib


def admit(
    phase: str,
    device: Device,
    *,
    coming: Mapping[str, int],
    leaving: Mapping[str, int],
    staying: Mapping[str, int],
    moved: Sequence[str],
) -> None:
    """Raise `AdmissionError` unless there is room on the device for `coming` once `leaving` has left.

    Args:
        phase: what is entered, for the message.
        device: measured now, and closely if there is too little.
        coming, leaving, staying: name -> bytes. What is unknown counts 0.
        moved: what has been done on the way, for the message.
    """
    now, needed = device.room(), sum(coming.values())
    room = now.free + now.reserved - now.allocated + sum(leaving.values())
    if needed <= room:
        return
    usage = device.usage()
    others = usage.by_others or 0
    own = usage.allocated - sum(staying.values()) - sum(leaving.values())
    holders = {**staying, "other tensors of this process": max(own, 0), "other processes": others}
    listed = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in holders.items() if nbytes) or "nothing that is known"
    parts = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in coming.items())
    done = f"Done so far: {', '.join(moved)}" if moved else "Nothing was moved"
    raise AdmissionError(
        f"phase {phase!r} needs {gib(needed)} ({parts}) and there is room for {gib(room)} of {gib(usage.total)}: "
        f"{gib(needed - room)} are missing. What stays on the device: {listed}. {done}. Make the engine's KV cache "
        f"smaller, or let more leave in this phase"
    )
