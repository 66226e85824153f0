"""Who sits where, and which transport is taken for what reason."""

import multiprocessing
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from wsync import topology as topology_module
from wsync.errors import UnsupportedError
from wsync.registry import transports
from wsync.topology import CPU, Endpoint, Topology, choose, local_endpoint
from wsync.transports.inproc import InprocTransport
from wsync.transports.shm import ShmTransport

HERE = local_endpoint("cpu")


def beside(**changes: Any) -> Endpoint:
    return replace(HERE, **changes)


ANOTHER: dict[str, Any] = {"process": "another", "pid": 1}
"""What differs in another process."""


def serving(*receivers: Endpoint) -> Topology:
    return Topology(sender=HERE, receivers=receivers)


@dataclass
class Willing:
    """A transport that serves everything."""

    name: str = "willing"
    by_reference: bool = False

    def refuse(self, topology: Topology) -> str | None:
        return None

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> Any:
        raise NotImplementedError

    def receiver(self, ticket: object, index: int, deadline: object) -> Any:
        raise NotImplementedError


def test_an_endpoint_says_machine_process_and_device() -> None:
    assert local_endpoint(torch.device("cpu")) == HERE
    assert HERE.pid == os.getpid()
    assert HERE.device == "cpu"
    assert len(HERE.host) == 36


def test_cuda_devices_are_named_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Properties:
        uuid: str

    def properties(device: torch.device) -> Properties:
        return Properties(f"0000-{device.index}")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert local_endpoint("cuda:1").device == "cuda:0000-1"


def test_other_devices_and_machines_without_a_boot_id_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with pytest.raises(UnsupportedError, match="'meta'"):
        local_endpoint("meta")
    monkeypatch.setattr(topology_module, "_BOOT_ID", tmp_path / "absent")
    with pytest.raises(UnsupportedError, match="absent is not readable"):
        local_endpoint("cpu")


def test_auto_takes_the_first_that_serves_and_says_why_not_the_others() -> None:
    choice = choose(serving(HERE, HERE), transports(), "auto")
    assert choice.transport.name == "inproc"
    assert choice.rejected["shm"] == choice.rejected["gloo"] == "ranked after inproc"
    choice = choose(serving(HERE, beside(**ANOTHER)), transports(), "auto")
    assert choice.transport.name == "shm"
    assert "pid 1" in choice.rejected["inproc"]
    assert choice.explain().startswith(f"shm to 2 worker(s) (not inproc: {choice.rejected['inproc']}; not cuda_ipc: ")


def test_a_name_is_taken_or_refused_with_its_reason() -> None:
    choice = choose(serving(HERE), transports(), "shm")
    assert choice.transport.name == "shm"
    assert set(choice.rejected.values()) == {"shm was asked for"}
    with pytest.raises(UnsupportedError, match=r"inproc: .*not one process; shm: inproc was asked for"):
        choose(serving(beside(**ANOTHER)), transports(), "inproc")
    with pytest.raises(UnsupportedError, match=r"no transport 'infiniband'; choose auto or one of: inproc, shm"):
        choose(serving(HERE), transports(), "infiniband")


def test_an_object_is_taken_as_it_is() -> None:
    mine = Willing()
    assert choose(serving(HERE), transports(), mine).transport is mine
    assert choose(serving(HERE), [mine], mine).rejected == {}


@pytest.mark.parametrize(
    ("worker", "inproc", "shm"),
    [
        (beside(**ANOTHER, host="elsewhere"), "not one process", "not one host"),
        (beside(**ANOTHER, device="cuda:GPU-7"), "not one process", "not in host memory"),
        (beside(process="another", network=7), "not one process", "network namespace 7"),
    ],
)
def test_where_none_serves_every_reason_is_listed(worker: Endpoint, inproc: str, shm: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        choose(serving(HERE, worker), transports(), "auto")
    assert f"inproc: the trainer is {HERE}" in str(caught.value)
    for words in (inproc, shm, str(worker)):
        assert words in str(caught.value)


def test_a_container_with_an_equal_pid_is_another_process() -> None:
    """Boot id and pid may be equal; where the network is shared, shared memory works."""
    choice = choose(serving(HERE, beside(process="another")), transports(), "auto")
    assert choice.transport.name == "shm"
    assert "not one process" in choice.rejected["inproc"]


def test_a_forked_child_is_another_process_of_the_same_network() -> None:
    child = multiprocessing.get_context("fork").Pool(1)
    with child:
        there = child.apply_async(local_endpoint, ("cpu",)).get(20)
    assert there.process != HERE.process
    assert (there.host, there.network) == (HERE.host, HERE.network)
    assert HERE.network == os.stat("/proc/self/ns/net").st_ino


def test_inproc_serves_any_device_of_this_process() -> None:
    assert InprocTransport().refuse(serving(beside(device="cuda:GPU-7"))) is None


def test_shm_says_that_it_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ShmTransport().refuse(serving(HERE)) is None
    monkeypatch.setattr("sys.platform", "darwin")
    assert "needs Linux" in str(ShmTransport().refuse(serving(HERE)))
