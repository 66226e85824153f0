"""Faults drawn from seeds: the end is an error or the right bytes, never silence or something else."""

import threading
from functools import partial

import pytest

from wsync.deadline import Deadline
from wsync.errors import PeerError, TransportError, WsyncError
from wsync.testing.actors import Actor, Order, consume
from wsync.testing.bench import BUCKET_BYTES, Bench
from wsync.testing.chaos import ChaosTransport, Fault, Kind
from wsync.testing.samples import digests_of, plan_of, tensor_zoo
from wsync.transports.inproc import InprocTransport
from wsync.transports.shm import ShmTransport

TENSORS = tensor_zoo(2, 6 * BUCKET_BYTES)
PLAN = plan_of(TENSORS, BUCKET_BYTES)
BENCHES = {
    "inproc": Bench(make=InprocTransport, processes=False, timeout_s=20),
    "shm": Bench(make=ShmTransport, processes=True, timeout_s=20),
}


def run(bench: Bench, fault: Fault) -> tuple[WsyncError | None, str, object]:
    """One sync through the fault: the sender's error, and what the receiver said last."""
    sender = ChaosTransport(bench.make(), fault).sender(
        slot_bytes=PLAN.capacity, num_slots=2, receivers=1, generation=1
    )
    order = Order(ticket=sender.ticket(), plan=PLAN, timeout_s=2 if fault.kind == "drop" else bench.timeout_s)
    error: WsyncError | None = None
    with Actor(bench.processes, bench.timeout_s, consume, bench.make, order) as actor:
        try:
            sender.accept(bench.deadline)
            actor.hear("connected")
            bench.send(sender, PLAN, TENSORS)
        except WsyncError as caught:
            error = caught
            sender.close()
        said, value = actor.hear_any()
        sender.close()
    return error, said, value


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES.keys())
@pytest.mark.parametrize("kind", ["drop", "duplicate", "raise"])
@pytest.mark.parametrize("bucket", [0, 2, len(PLAN.buckets) - 1])
def test_lost_repeated_and_failed_commits_end_in_errors(bench: Bench, kind: Kind, bucket: int) -> None:
    fault = Fault(kind=kind, bucket=bucket)
    error, said, value = run(bench, fault)
    assert fault.done == f"{kind} at bucket {bucket}"
    if bucket < len(PLAN.buckets) - 1:
        assert error is not None
    # That the last one is missing is known to the receiver only; a repetition of it is never read.
    if (kind, bucket) == ("duplicate", len(PLAN.buckets) - 1):
        assert (said, value) == ("synced", digests_of(TENSORS))
    else:
        assert said == "error", value


@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES.keys())
@pytest.mark.parametrize("kind", ["flip", "swap"])
@pytest.mark.parametrize("seed", range(4))
def test_a_spoiled_slot_spoils_exactly_one_tensor(bench: Bench, kind: Kind, seed: int) -> None:
    fault = Fault(kind=kind, bucket=seed, seed=seed)
    error, said, value = run(bench, fault)
    assert error is None
    assert said == "synced"
    assert isinstance(value, dict)
    expected = digests_of(TENSORS)
    wrong = [name for name in expected if value[name] != expected[name]]
    assert len(wrong) == 1, (fault.done, wrong)
    assert fault.done.endswith(f"of {wrong[0]}")


def test_a_delayed_commit_arrives() -> None:
    until = threading.Event()
    fault = Fault(kind="delay", bucket=1, until=until)
    releasing = threading.Timer(0.2, until.set)
    releasing.start()
    error, said, value = run(BENCHES["inproc"], fault)
    assert (error, said) == (None, "synced")
    assert value == digests_of(TENSORS)
    assert fault.done == "delay at bucket 1"
    releasing.join()


def test_a_fault_on_the_receivers_side_is_raised_there() -> None:
    inner = InprocTransport()
    chaos = ChaosTransport(inner, Fault(kind="raise", bucket=1, side="receiver"))
    sender = chaos.sender(slot_bytes=PLAN.capacity, num_slots=2, receivers=1, generation=1)
    receiver = chaos.receiver(sender.ticket(), 0, Deadline.after(5))
    for bucket in PLAN.buckets[:2]:
        sender.acquire(Deadline.after(5))
        sender.commit(bucket)
    buckets = receiver.buckets(PLAN, Deadline.after(5))
    assert next(buckets)[0] == PLAN.buckets[0]
    with pytest.raises(TransportError, match="on purpose"):
        next(buckets)
    sender.close()


def test_a_receiver_that_a_fault_kills_is_missed() -> None:
    bench = BENCHES["shm"]
    make = partial(ChaosTransport, ShmTransport(), Fault(kind="kill", bucket=2, side="receiver"))
    sender = ShmTransport().sender(slot_bytes=PLAN.capacity, num_slots=2, receivers=1, generation=1)
    order = Order(ticket=sender.ticket(), plan=PLAN)
    with Actor(True, bench.timeout_s, consume, make, order) as actor:
        sender.accept(bench.deadline)
        with pytest.raises(PeerError, match=r"receiver 0 \(pid \d+\)"):
            bench.send(sender, PLAN, TENSORS)
        actor.hear("connected")
    sender.close()
