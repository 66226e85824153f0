"""Host memory as the device that tensors are put in, for trainers on the CPU."""

import os
from contextlib import suppress

from wsync.memory import host
from wsync.memory.device import Room, Usage
from wsync.memory.host_pool import pinned_bytes


class HostDevice:
    """The memory of this machine. Meets `wsync.memory.device.Device`.

    Nothing tells tensors from the rest of a process here, so that `allocated` and `reserved` are both its resident set.
    `total` and `free` are the machine's, whatever limit a container has been given. `by_others` is None: pages are
    shared, and what the page cache holds is free for the asking.
    """

    name = "host memory"

    def describe(self) -> str:
        """See `Device`."""
        return self.name

    def room(self) -> Room:
        """See `Device`."""
        return self.usage()

    def usage(self) -> Usage:
        """See `Device`."""
        machine = host.proc_sizes("meminfo")
        resident = host.resident_bytes()
        # The kernel raises its mark only now and then; it may be behind what the process has at this moment.
        peak = max(host.proc_sizes("self/status").get("VmHWM", 0), resident)
        return Usage(
            total=machine["MemTotal"],
            free=machine["MemAvailable"],
            allocated=resident,
            reserved=resident,
            peak_allocated=peak,
            peak_reserved=peak,
            by_this_process=resident,
            by_others=None,
            host_rss=resident,
            host_pinned=pinned_bytes(),
        )

    def reset_peak(self) -> None:
        """See `Device`. Where the kernel refuses (some containers do), peaks stay those of the process's whole life."""
        with suppress(OSError):
            descriptor = os.open(host.PROC / "self/clear_refs", os.O_WRONLY)
            try:
                os.write(descriptor, b"5")  # just the mark of the resident set, see proc_pid_clear_refs(5)
            finally:
                os.close(descriptor)

    def empty_cache(self) -> None:
        """See `Device`."""
        host.trim()
