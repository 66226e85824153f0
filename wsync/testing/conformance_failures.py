"""What every transport must do when either side fails, stops, leaves or breaks the order. See `conformance`."""

import signal
import threading

from wsync.deadline import Deadline
from wsync.errors import ClosedError, PeerError, ProtocolError, SyncTimeout
from wsync.testing.actors import Actor, produce
from wsync.testing.bench import BUCKET_BYTES, Bench, expect
from wsync.testing.samples import fill_slot, plan_of, tensor_zoo, tiny_tensors


def check_consumer_raises(bench: Bench) -> None:
    """A receiver that fails at bucket k is heard at the sender's next wait, words and traceback; a new sender works."""
    tensors = tensor_zoo(4, 6 * BUCKET_BYTES)
    plan = plan_of(tensors, BUCKET_BYTES)
    for k in (0, len(plan.buckets) // 2, len(plan.buckets) - 1):
        with (
            bench.sender(plan, receivers=bench.receivers) as sender,
            bench.consumer(sender, plan, index=0, raise_at=k),
            bench.consumers(sender, plan, range(1, bench.receivers)) as others,
        ):
            sender.accept(bench.deadline)
            with expect(PeerError, "receiver 0", f"gives up at bucket {k}") as caught:
                bench.send(sender, plan, tensors)
            remote_traceback = getattr(caught.error, "remote_traceback", "")
            assert "RuntimeError" in remote_traceback, f"no traceback of the receiver: {remote_traceback!r}"
            with expect(PeerError, f"gives up at bucket {k}"):
                sender.drain(bench.deadline)
            sender.close()
            for other in others:
                other.hear("connected")
                said, value = other.hear_any()
                assert said == "synced" or value[0] == "PeerError", f"the other receiver saw {value}"
    bench.deliver(tensors, receivers=bench.receivers)


def check_consumer_killed(bench: Bench) -> None:
    """A receiver killed at bucket k is heard at once; a new sender works; nothing is left."""
    if not bench.processes:
        return
    tensors = tensor_zoo(6, 6 * BUCKET_BYTES)
    plan = plan_of(tensors, BUCKET_BYTES)
    last = bench.receivers - 1
    for k in (0, len(plan.buckets) // 2, len(plan.buckets) - 1):
        with (
            bench.sender(plan, receivers=bench.receivers) as sender,
            bench.consumers(sender, plan, range(last)),
            bench.consumer(sender, plan, index=last, kill_at=k),
        ):
            sender.accept(bench.deadline)
            with expect(PeerError, f"receiver {last}"):
                bench.send(sender, plan, tensors)
    bench.deliver(tensors)


def check_producer_leaves(bench: Bench) -> None:
    """A sender that dies, or closes, at bucket k is heard by a receiver at once."""
    for leave in ("kill", "close") if bench.processes else ("close",):
        for k in (0, 2):
            delivery = bench.delivery(seed=7, leave_at=k, leave=leave)
            with Actor(bench.processes, bench.timeout_s, produce, bench.make, delivery) as actor:
                ticket, plan = actor.hear("ticket")
                receiver = bench.make().receiver(ticket, 0, bench.deadline)
                seen = 0
                with expect(PeerError, "sender"):
                    for _ in receiver.buckets(plan, bench.deadline):
                        seen += 1
                assert seen <= k, f"{seen} buckets were read, {k} were committed"
                receiver.close()
            with expect(PeerError):
                bench.make().receiver(ticket, 0, bench.deadline)


def check_stopped(bench: Bench) -> None:
    """Whoever is alive and silent is given up at the deadline, by name, and not before."""
    tensors = tensor_zoo(8, 6 * BUCKET_BYTES)
    plan = plan_of(tensors, BUCKET_BYTES)
    with bench.sender(plan) as sender, bench.consumer(sender, plan, wait_at=1) as actor:
        sender.accept(bench.deadline)
        for bucket in plan.buckets[:2]:
            fill_slot(bucket, sender.acquire(bench.deadline), tensors)
            sender.commit(bucket)
        actor.hear("connected")
        actor.hear("waiting")
        if bench.processes:
            actor.signal(signal.SIGSTOP)
        with expect(SyncTimeout, "[0]", f"{bench.short_s:g} s"):
            sender.drain(Deadline.after(bench.short_s))
        if bench.processes:
            actor.signal(signal.SIGKILL)
            with expect(PeerError, "receiver 0"):
                sender.drain(bench.deadline)
        else:
            actor.tell("go on")
    delivery = bench.delivery(seed=8, leave_at=2, leave="wait")
    with Actor(bench.processes, bench.timeout_s, produce, bench.make, delivery) as actor:
        ticket, plan = actor.hear("ticket")
        receiver = bench.make().receiver(ticket, 0, bench.deadline)
        actor.hear("waiting")
        with expect(SyncTimeout, "bucket 2"):
            for _ in receiver.buckets(plan, Deadline.after(bench.short_s)):
                pass
        receiver.close()
        actor.tell("go on")


def check_out_of_order(bench: Bench) -> None:
    """A bucket that is left out, or sent twice, is a `ProtocolError` at the receiver, which the sender hears of."""
    tensors = tensor_zoo(11, 6 * BUCKET_BYTES)
    plan = plan_of(tensors, BUCKET_BYTES)
    first, second, third = plan.buckets[:3]
    for order in ((first, third), (first, first), (second,)):
        with bench.sender(plan) as sender, bench.consumer(sender, plan) as actor:
            sender.accept(bench.deadline)
            with expect(PeerError, f"bucket {order[-1].index}"):
                for bucket in order:
                    fill_slot(bucket, sender.acquire(bench.deadline), tensors)
                    sender.commit(bucket)
                sender.drain(bench.deadline)
            actor.hear("connected")
            name, text, _ = actor.hear("error")
            assert name == "ProtocolError", f"{name}: {text}"


def check_closed(bench: Bench) -> None:
    """After close: `ClosedError` on this side, `PeerError` on the other; closing twice is nothing; waiters wake."""
    tensors = tiny_tensors(12, 20)
    plan = plan_of(tensors, BUCKET_BYTES)
    with bench.sender(plan) as sender:
        with expect(ProtocolError):
            sender.commit(plan.buckets[0])
        closing = threading.Timer(bench.short_s, sender.close)
        closing.start()
        with expect(ClosedError):
            sender.accept(bench.deadline)
        closing.join()
        sender.close()
        for use in (sender.acquire, sender.drain, sender.accept):
            with expect(ClosedError):
                use(bench.deadline)
        with expect(PeerError):
            bench.make().receiver(sender.ticket(), 0, bench.deadline)
    with bench.sender(plan, num_slots=1) as sender, bench.consumer(sender, plan, wait_at=0) as actor:
        sender.accept(bench.deadline)
        fill_slot(plan.buckets[0], sender.acquire(bench.deadline), tensors)
        sender.commit(plan.buckets[0])
        actor.hear("connected")
        actor.hear("waiting")
        closing = threading.Timer(bench.short_s, sender.close)
        closing.start()
        with expect(ClosedError):
            sender.acquire(bench.deadline)
        closing.join()
        actor.tell("go on")
        name, text, _ = actor.hear("error")
        assert name == "PeerError", f"{name}: {text}"


def check_receiver_closes(bench: Bench) -> None:
    """A receiver that closes is missed at the next acquire, and its own iterator ends with `ClosedError`."""
    if bench.apart:
        return
    plan = plan_of(tiny_tensors(13, 20), BUCKET_BYTES)
    with bench.sender(plan) as sender:
        accepting = threading.Thread(target=sender.accept, args=(bench.deadline,))
        accepting.start()
        receiver = bench.make().receiver(sender.ticket(), 0, bench.deadline)
        accepting.join()
        closing = threading.Timer(bench.short_s, receiver.close)
        closing.start()
        with expect(ClosedError):
            next(receiver.buckets(plan, bench.deadline))
        closing.join()
        receiver.close()
        receiver.fail("too late to matter")
        with expect(PeerError):
            sender.acquire(bench.deadline)
