"""What numbers depend on: hardware, versions, load, free memory."""

import json
import os
import platform
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_OTHERS = ("vllm", "sglang", "checkpoint-engine")


def hardware() -> dict[str, object]:
    """CPU, cores that this process may use, memory, GPUs."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def versions() -> dict[str, str]:
    """Of Python, torch and wsync, and of the engines and rivals that are here."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "wsync": "not installed"}
    for name, distribution in {"wsync": "wsync-rl", **{other: other for other in _OTHERS}}.items():
        with suppress(PackageNotFoundError):
            found[name] = version(distribution)
    return found


def as_text(**found: object) -> str:
    """`found` as JSON, with the time, the hardware and versions before it."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return json.dumps({"time": now, "hardware": hardware(), "versions": versions(), **found}, indent=1) + "\n"


def load_average() -> float:
    """Processes that wanted a core in the last minute: this machine may not be alone."""
    return os.getloadavg()[0]


def free_bytes() -> int | None:
    """Memory that can be had without swapping; None where the kernel does not say."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.is_file() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
