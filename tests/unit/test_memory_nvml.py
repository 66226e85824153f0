"""What the driver says about a device, found by its UUID."""

import os
import sys

import pytest

from tests.unit.fake_nvml import (
    GIB,
    NO_PERMISSION,
    FakeNvml,
    Gpu,
    NVMLError,
    NVMLLibraryMismatchError,
)
from wsync.memory.nvml import NvmlDevice, open_nvml

ME = os.getpid()
OTHER = ME + 1
A, B = "3f2a91c0-0000-1111-2222-333333333333", "77770000-4444-5555-6666-777777777777"


def opened(monkeypatch: pytest.MonkeyPatch, uuid: str, *gpus: Gpu) -> NvmlDevice | None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    return open_nvml(uuid)


def shares(monkeypatch: pytest.MonkeyPatch, uuid: str, *gpus: Gpu) -> tuple[int | None, int | None]:
    device = opened(monkeypatch, uuid, *gpus)
    assert device is not None
    return device.shares()


@pytest.mark.parametrize("turned", [False, True])
def test_the_uuid_decides_whatever_the_order(monkeypatch: pytest.MonkeyPatch, turned: bool) -> None:
    gpus = [Gpu(f"GPU-{A}", 30 * GIB, [(ME, 10 * GIB)]), Gpu(f"GPU-{B}", 70 * GIB, [(OTHER, 50 * GIB), (ME, 20 * GIB)])]
    gpus = gpus[::-1] if turned else gpus
    assert shares(monkeypatch, A, *gpus) == (10 * GIB, 20 * GIB)
    assert shares(monkeypatch, B, *gpus) == (20 * GIB, 50 * GIB)


def test_others_are_counted_whose_processes_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what the driver keeps for itself counted."""
    assert shares(monkeypatch, A, Gpu(f"GPU-{A}", 12 * GIB, [(ME, 2 * GIB)])) == (2 * GIB, 10 * GIB)


def test_several_processes_some_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [(OTHER, None), (OTHER + 1, GIB), (ME, 4 * GIB), (OTHER + 2, 0)]
    assert shares(monkeypatch, A, Gpu(f"GPU-{A}", 9 * GIB, processes)) == (4 * GIB, 5 * GIB)


@pytest.mark.parametrize("own", [None, 0])
def test_a_process_without_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch, own: int | None) -> None:
    gpu = Gpu(f"GPU-{A}", 9 * GIB, [(OTHER, 4 * GIB), (ME, own)])
    assert shares(monkeypatch, A, gpu) == (None, None)


def test_a_process_that_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares(monkeypatch, A, Gpu(f"GPU-{A}", 9 * GIB, [(OTHER, 4 * GIB)])) == (None, None)
    assert shares(monkeypatch, A, Gpu(f"GPU-{A}", 9 * GIB)) == (None, None)


def test_numbers_that_do_not_fit_together_are_never_below_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for one after the other, and memory moves in between."""
    assert shares(monkeypatch, A, Gpu(f"GPU-{A}", 3 * GIB, [(ME, 4 * GIB)])) == (4 * GIB, 0)


@pytest.mark.parametrize("error", [NVMLError(NO_PERMISSION), NVMLLibraryMismatchError("older")])
def test_what_the_driver_refuses_is_unknown(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    mine = [(ME, 4 * GIB)]
    assert shares(monkeypatch, A, Gpu(f"GPU-{A}", 9 * GIB, mine, processes_fail=error)) == (None, None)
    assert shares(monkeypatch, A, Gpu(f"GPU-{A}", 9 * GIB, mine, memory_fails=error)) == (4 * GIB, None)


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened(monkeypatch, A, Gpu(f"GPU-{A}", 9 * GIB, processes_fail=ZeroDivisionError()))
    assert device is not None
    with pytest.raises(ZeroDivisionError):
        device.shares()


def test_a_mig_instance_is_asked_and_not_the_gpu_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Gpu(f"GPU-{A}", 60 * GIB, [(ME, 5 * GIB), (OTHER, 50 * GIB)], mig=True)
    instance = Gpu(f"MIG-{B}", 6 * GIB, [(ME, 5 * GIB)])
    device = opened(monkeypatch, B, whole, instance)
    assert device is not None
    assert device.kind == "MIG"
    assert device.shares() == (5 * GIB, GIB)


def test_a_gpu_in_mig_mode_is_nobodys_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has one of its instances, and its numbers are not those of the whole."""
    assert opened(monkeypatch, A, Gpu(f"GPU-{A}", 60 * GIB, [(ME, 5 * GIB)], mig=True)) is None
    device = opened(monkeypatch, A, Gpu(f"GPU-{A}", 60 * GIB, [(ME, 5 * GIB)], mig=False))
    assert device is not None
    assert device.kind == "GPU"


def test_a_device_that_nvml_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(monkeypatch, B, Gpu(f"GPU-{A}", GIB, [(ME, GIB)])) is None


def test_nvml_is_missing_or_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(f"GPU-{A}", GIB, [(ME, GIB)])
    assert opened(monkeypatch, A, gpu) is not None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_nvml(A) is None
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([gpu], no_driver=True))
    assert open_nvml(A) is None
    monkeypatch.delattr(FakeNvml, "NVMLLibraryMismatchError")
    assert opened(monkeypatch, A, gpu) is None
