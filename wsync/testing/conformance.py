"""What every transport must do, as plain functions that raise `AssertionError`.

    for check in TRANSPORT_CHECKS:
        check(Bench(make=MyTransport, processes=True))

`Bench.processes` says whether receivers run in processes of their own (which can then be killed and stopped) or on
threads beside the sender. Bytes are random, slots are poisoned after release, every wait has a deadline.
"""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from wsync.background import num_busy_threads
from wsync.deadline import Deadline
from wsync.errors import PeerError, SyncTimeout, UnsupportedError
from wsync.testing import conformance_failures as failures
from wsync.testing.actors import descriptors, open_descriptors, resident_bytes
from wsync.testing.bench import BUCKET_BYTES, Bench, check_equal, expect
from wsync.testing.chaos import POISON
from wsync.testing.samples import fill_slot, plan_of, random_tensor, tensor_zoo, tiny_tensors

FLAT_BYTES = 16 << 20
"""How much the resident memory of a process may differ between two quiet moments."""


def check_layouts(bench: Bench) -> None:
    """Every dtype and layout, one tensor larger than several buckets, all receivers, three syncs with new values."""
    plan = plan_of(tensor_zoo(0, 5 * BUCKET_BYTES), BUCKET_BYTES)
    with (
        bench.sender(plan, receivers=bench.receivers) as sender,
        bench.consumers(sender, plan, range(bench.receivers), syncs=3) as actors,
    ):
        sender.accept(bench.deadline)
        for seed in range(3):
            tensors = tensor_zoo(seed, 5 * BUCKET_BYTES)
            bench.send(sender, plan, tensors)
            for actor in actors:
                if not seed:
                    actor.hear("connected")
                check_equal(actor.hear("synced"), tensors)


def check_many_tiny(bench: Bench) -> None:
    """1,000 tensors of a few elements, narrow odd sizes before wider dtypes."""
    bench.deliver(tiny_tensors(1, 1000), bucket_bytes=64 << 10)


def check_back_pressure(bench: Bench) -> None:
    """No slot is given out before the slowest receiver has released it; it is waited for no longer than asked."""
    tensors = tensor_zoo(2, 8 * BUCKET_BYTES)
    plan = plan_of(tensors, BUCKET_BYTES)
    last = bench.receivers - 1
    with (
        bench.sender(plan, receivers=bench.receivers) as sender,
        bench.consumers(sender, plan, range(last)) as fast,
        bench.consumer(sender, plan, index=last, wait_at=1) as slow,
    ):
        sender.accept(bench.deadline)
        sent = 0
        with expect(SyncTimeout, f"[{last}]"):
            for bucket in plan.buckets:
                fill_slot(
                    bucket, sender.acquire(Deadline.after(bench.short_s if sent > 2 else bench.timeout_s)), tensors
                )
                sender.commit(bucket)
                sent += 1
        assert sent == 3, f"{sent} buckets were sent into 2 slots while a receiver held bucket 1"
        slow.hear("connected")
        slow.hear("waiting")
        slow.tell("go on")
        for bucket in plan.buckets[sent:]:
            fill_slot(bucket, sender.acquire(bench.deadline), tensors)
            sender.commit(bucket)
        sender.drain(bench.deadline)
        for actor in fast:
            actor.hear("connected")
        for actor in (*fast, slow):
            check_equal(actor.hear("synced"), tensors)


def check_kept_views(bench: Bench) -> None:
    """Views that a consumer keeps stay readable memory, of no value: the slot has gone on."""
    tensors = tensor_zoo(3, 3 * BUCKET_BYTES)
    plan = plan_of(tensors, BUCKET_BYTES)
    with bench.sender(plan) as sender, bench.consumer(sender, plan, keep_views=True) as actor:
        sender.accept(bench.deadline)
        for bucket in plan.buckets:
            fill_slot(bucket, sender.acquire(bench.deadline), tensors)
            sender.commit(bucket)
        sender.drain(bench.deadline)
        actor.hear("connected")
        check_equal(actor.hear("synced"), tensors)
        actor.tell("report")
        kept = b"".join(actor.hear("kept"))
        assert len(kept) >= sum(spec.nbytes for spec in plan.specs)
        assert kept.count(POISON) == len(kept), "what a consumer keeps after releasing it is not the slot"


def check_late_consumer(bench: Bench) -> None:
    """An absent receiver is named at the deadline; it may come later, the rest stays as it was."""
    tensors = tensor_zoo(9, 2 * BUCKET_BYTES)
    plan = plan_of(tensors, BUCKET_BYTES)
    last = bench.receivers - 1
    with (
        bench.sender(plan, receivers=bench.receivers) as sender,
        bench.consumers(sender, plan, range(last)) as early,
    ):
        patience = bench.deadline
        absent = ""
        while f"[{last}]" not in absent:
            patience.remaining("the other receivers to connect")
            with expect(SyncTimeout, f"{last}]") as caught:
                sender.accept(Deadline.after(bench.short_s))
            absent = str(caught.error)
        for actor in early:
            actor.hear("connected")
        with bench.consumer(sender, plan, index=last) as late:
            sender.accept(bench.deadline)
            bench.send(sender, plan, tensors)
            late.hear("connected")
            for actor in (*early, late):
                check_equal(actor.hear("synced"), tensors)


def check_refused(bench: Bench) -> None:
    """A wrong secret, generation or index, or an index twice, is refused; the invited receiver is served."""
    tensors = tiny_tensors(10, 20)
    plan = plan_of(tensors, BUCKET_BYTES)
    with bench.sender(plan) as sender:
        ticket = sender.ticket()
        accepting = threading.Thread(target=sender.accept, args=(bench.deadline,))
        accepting.start()
        wrong = bytes(byte ^ 1 for byte in ticket.secret)
        for uninvited, index in (
            (replace(ticket, secret=wrong), 0),
            (replace(ticket, secret=b""), 0),
            (replace(ticket, generation=ticket.generation + 1), 0),
            (ticket, 1),
            (replace(ticket, address="0" * len(ticket.address)), 0),
        ):
            with expect(PeerError):
                bench.make().receiver(uninvited, index, bench.deadline)
        with bench.consumer(sender, plan) as actor:
            accepting.join(bench.timeout_s)
            actor.hear("connected")
            with expect(PeerError):
                bench.make().receiver(ticket, 0, bench.deadline)
            bench.send(sender, plan, tensors)
            check_equal(actor.hear("synced"), tensors)


def check_two_senders(bench: Bench) -> None:
    """Two senders at once in one process, each with its own receivers and bytes, their commits interleaved."""
    jobs = [
        (plan_of(zoo, BUCKET_BYTES), zoo)
        for zoo in (tensor_zoo(14, 6 * BUCKET_BYTES), tensor_zoo(15, 6 * BUCKET_BYTES))
    ]
    with ExitStack() as stack:
        senders = [stack.enter_context(bench.sender(plan)) for plan, _ in jobs]
        actors = [
            stack.enter_context(bench.consumer(sender, plan)) for sender, (plan, _) in zip(senders, jobs, strict=True)
        ]
        for sender in senders:
            sender.accept(bench.deadline)
        for pair in zip(*(plan.buckets for plan, _ in jobs), strict=True):
            for bucket, sender, (_, zoo) in zip(pair, senders, jobs, strict=True):
                fill_slot(bucket, sender.acquire(bench.deadline), zoo)
                sender.commit(bucket)
        for sender, actor, (_, zoo) in zip(senders, actors, jobs, strict=True):
            sender.drain(bench.deadline)
            actor.hear("connected")
            check_equal(actor.hear("synced"), zoo)


def check_by_reference(bench: Bench) -> None:
    """A sender that says so hands tensors over where they lie, between slots; one that does not refuses."""
    tensors = tensor_zoo(16, BUCKET_BYTES // 2)
    plan = plan_of(tensors, BUCKET_BYTES)
    with bench.sender(plan) as sender, bench.consumer(sender, plan, syncs=2) as actor:
        sender.accept(bench.deadline)
        if not sender.by_reference:
            with expect(UnsupportedError):
                sender.hand_over(plan.buckets[0], ())
            return
        actor.hear("connected")
        there = {name: tensor.to(bench.device) for name, tensor in tensors.items()}
        for odd in (0, 1):
            for bucket in plan.buckets:
                if bucket.index % 2 == odd:
                    sender.hand_over(bucket, [there[meta.name] for meta in bucket.tensors])
                else:
                    fill_slot(bucket, sender.acquire(bench.deadline), tensors)
                    sender.commit(bucket)
            sender.drain(bench.deadline)
            check_equal(actor.hear("synced"), tensors)


def check_flat(bench: Bench) -> None:
    """200 buckets leave descriptors and memory of both sides as they were after the first few."""
    tensors = {"large": random_tensor((10, 64 << 10), torch.float32, torch.Generator().manual_seed(17))}
    plan = plan_of(tensors, 256 << 10)
    assert len(plan.buckets) == 10
    with bench.sender(plan) as sender, bench.consumer(sender, plan, syncs=26) as actor:
        sender.accept(bench.deadline)
        actor.hear("connected")
        seen = []
        for sync in range(26):
            bench.send(sender, plan, tensors)
            check_equal(actor.hear("synced"), tensors)
            if sync in (4, 24):
                gc.collect()
            seen.append((open_descriptors(), resident_bytes()))
        # The allocator has settled after five syncs; in the last one the receiver is already leaving.
        (descriptors, resident), (descriptors_after, resident_after) = seen[4], seen[24]
        assert descriptors == descriptors_after, f"{descriptors} descriptors became {descriptors_after}"
        grown = resident_after - resident
        assert grown < FLAT_BYTES, f"{grown} bytes of memory were not given back over 200 buckets of {256 << 10} bytes"
        before, after = actor.hear("done")
        assert before == after, f"the receiver had {before} descriptors after its first sync and {after} at the end"


def check_nothing_left(bench: Bench) -> None:
    """A sync, a failed one, and a killed receiver leave no descriptor and no thread in this process."""
    tensors = tensor_zoo(18, 2 * BUCKET_BYTES)
    plan = plan_of(tensors, BUCKET_BYTES)

    def run() -> None:
        bench.deliver(tensors)
        for how in ("raise_at", "kill_at") if bench.processes else ("raise_at",):
            with bench.sender(plan) as sender, bench.consumer(sender, plan, **{how: 1}):
                sender.accept(bench.deadline)
                with expect(PeerError):
                    bench.send(sender, plan, tensors)

    run()  # starts what the first process of a kind, and its first failure, start for good
    gc.collect()
    before, known = (open_descriptors(), num_busy_threads()), descriptors()
    run()
    gc.collect()
    patience = bench.deadline
    while (after := (open_descriptors(), num_busy_threads())) != before and time.monotonic() < patience.expires:
        pass  # a thread that has given its answer may not have ended
    more = sorted((descriptors() - known).elements())
    assert after == before, f"(descriptors, threads) were {before} and are {after}; new are {more}"


TRANSPORT_CHECKS: tuple[Callable[[Bench], None], ...] = (
    check_layouts,
    check_many_tiny,
    check_back_pressure,
    check_kept_views,
    check_late_consumer,
    check_refused,
    check_two_senders,
    check_by_reference,
    check_flat,
    check_nothing_left,
    failures.check_consumer_raises,
    failures.check_consumer_killed,
    failures.check_producer_leaves,
    failures.check_stopped,
    failures.check_out_of_order,
    failures.check_closed,
    failures.check_receiver_closes,
)
"""All of it, cheapest first within each file."""
