"""What crossed NVLink, as the devices themselves count it."""

from typing import Any

_RECEIVED = 139
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: KiB of data, without headers."""

_ALL_LINKS = 0xFFFFFFFF


def received_bytes() -> list[int] | None:
    """By device, since it started; None where the driver does not tell."""
    import pynvml

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        counts = []
        for index in range(nvml.nvmlDeviceGetCount()):
            [value] = nvml.nvmlDeviceGetFieldValues(nvml.nvmlDeviceGetHandleByIndex(index), [(_RECEIVED, _ALL_LINKS)])
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                return None
            counts.append(int(value.value.ullVal) << 10)
    except nvml.NVMLError:
        return None
    return counts
