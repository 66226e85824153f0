"""Whoever knows that nothing moved says so: who says it when, and what is not looked at again then."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.test_module_producer import opened, prepared
from wsync import glance
from wsync.adapters.engines.places import Places
from wsync.copies import UNKNOWN, Keys
from wsync.plan import Plan, TensorSpec
from wsync.regions import Region
from wsync.replay import Replay, Routine, _Direct
from wsync.targets import Targets
from wsync.transports import inproc
from wsync.transports.inproc import InprocTransport
from wsync.views import Place, Views

A, B, C = object(), object(), object()

WHOLE = Place(memory=0, dtype=torch.float32, region=Region.span(0, 8192))


class Device:
    """Launches, and the looks at addresses in between."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.looks = 0
        self.cuda_stream = 1
        self.sent = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    kernel = pytest.importorskip("wsync.copy_kernel")
    device, addresses = Device(), kernel.addresses

    def look(tensors: Sequence[torch.Tensor]) -> list[int]:
        device.looks += 1
        found: list[int] = addresses(tensors)
        return found

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(kernel, "addresses", look)

    def send(array: Any, _: object) -> torch.Tensor:
        device.sent += 1
        return torch.from_numpy(array)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device)
    monkeypatch.setattr(kernel, "_sent", send)
    monkeypatch.setattr(kernel, "_launch", lambda kind, table, lists, most: device.launched.append(int(lists[0][0])))
    return device


def launches() -> Any:
    from wsync.copy_kernel import Launches

    return Launches([(WHOLE, WHOLE)], torch.device("cpu"))


def test_nothing_is_looked_at_if_both_sides_say_that_nothing_moved(device: Device) -> None:
    source, target, keys = torch.zeros(8192), torch.zeros(8192), (object(), object())
    made = launches()
    made.run([source], [target], keys)
    assert device.looks == 1
    for _ in range(2):
        assert made.again([source], [target], keys)
    assert device.looks == 1
    assert device.launched == [source.data_ptr()] * 3


@pytest.mark.parametrize(
    ("last", "now"), [((A, B), (A, C)), ((A, B), (C, B)), ((A, None), (A, None)), ((None, B), (None, B))]
)
def test_one_side_that_does_not_say_so_is_enough_to_look(device: Device, last: Keys, now: Keys) -> None:
    source, moved, target = torch.zeros(8192), torch.zeros(8192), torch.zeros(8192)
    made = launches()
    made.run([source], [target], last)
    assert not made.again([moved], [target], now)
    assert made.again([source], [target], now)
    assert device.looks == 3
    assert device.launched == [source.data_ptr()] * 2


def test_a_bucket_that_lies_in_another_slot_each_time_is_found_again(device: Device) -> None:
    slots, target = [torch.zeros(8192) for _ in range(3)], torch.zeros(8192)
    made = launches()
    for slot in slots:
        assert not made.again([slot], [target], UNKNOWN)
        made.run([slot], [target], UNKNOWN)
    for _ in range(2):
        for slot in slots:
            assert made.again([slot], [target], UNKNOWN)
    assert device.launched == [slot.data_ptr() for slot in slots] * 3


def test_places_that_never_come_again_do_not_pile_up(device: Device) -> None:
    target, many = torch.zeros(8192), torch.zeros(100, 8192)
    made = launches()
    for source in many:
        made.run([source], [target], UNKNOWN)
    assert made.again([many[-1]], [target], UNKNOWN)
    assert not made.again([many[0]], [target], UNKNOWN)
    assert len(made._known) <= 16


def test_on_another_stream_all_is_sent_again(device: Device) -> None:
    """What was sent on the one is not sure to be there for the other."""
    source, target, keys = torch.zeros(8192), torch.zeros(8192), (object(), object())
    made = launches()
    made.run([source], [target], keys)
    sent = device.sent
    for stream in (2, 1):
        device.cuda_stream = stream
        assert not made.again([source], [target], keys)
        made.run([source], [target], keys)
        assert made.again([source], [target], keys)
    assert (sent, device.sent) == (2, 6), "a table and a list each time"


def test_a_key_that_is_equal_is_not_the_same(device: Device) -> None:
    source, moved, target = torch.zeros(8192), torch.zeros(8192), torch.zeros(8192)
    made = launches()
    made.run([source], [target], ([1], [2]))
    assert not made.again([moved], [target], ([1], [2]))


def key(producer: Any, plan: Plan) -> object | None:
    """The key of one sync of `producer`."""
    opened(producer)
    found = producer.references(plan.buckets[0])
    producer.close()
    assert isinstance(found, Views)
    part = found[:1]
    assert isinstance(part, Views)
    assert part.key is found.key
    return found.key


def test_a_producer_says_it_until_anything_moves() -> None:
    module = nn.Linear(8, 8)
    producer, plan = prepared(module, 4096)
    before, kept = module.weight.data, module.weight
    keys: list[object] = []
    for weight in (module.weight, before.clone(), before, nn.Parameter(torch.randn(8, 8))):
        if isinstance(weight, nn.Parameter):
            module.weight = weight  # the last one, while something keeps the old one
        else:
            module.weight.data = weight
        assert key(producer, plan) is None, "it had to look closely"
        keys.append(key(producer, plan))
        assert key(producer, plan) is keys[-1]
    assert None not in keys
    assert len(set(map(id, keys))) == len(keys)
    del kept


def test_a_producer_that_never_confirmed_says_the_same_of_what_it_looked_at_again() -> None:
    module = nn.Linear(8, 8)
    producer, plan = prepared(module, 4096)
    keys = []
    for _ in range(4):
        producer.open()
        found = producer.references(plan.buckets[0])
        assert isinstance(found, Views)
        keys.append(found.key)
    assert keys[0] is None
    assert keys[1] is keys[2] is keys[3] is not None
    module.weight.data = torch.randn(8, 8)
    assert key(producer, plan) is None


def test_a_producer_says_nothing_of_what_it_must_look_at_closely_every_time() -> None:
    module = nn.Linear(6, 1, bias=False)
    module.weight.data = torch._neg_view(torch.randn(1, 6))
    producer, plan = prepared(module, 4096)
    assert key(producer, plan) is None
    assert key(producer, plan) is None


def test_tensors_on_another_device_at_the_same_addresses_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(8, 8)
    producer, plan = prepared(module, 4096)
    places = Places("engine")
    places.settle(module)
    assert key(producer, plan) is None
    assert key(producer, plan) is not None
    recalled = places.recall()
    assert recalled is not None
    monkeypatch.setattr(glance, "device_numbers", lambda tensors: [7] * len(tensors))
    assert key(producer, plan) is None
    assert places.tensors(module).key is not recalled.key


def test_both_keys_reach_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.pack([TensorSpec(name="a", shape=(2,), dtype=torch.float32)], 4096)
    given: list[Keys] = []
    copies = SimpleNamespace(run=lambda sources, targets, keys: given.append(keys))
    monkeypatch.setattr(Routine, "direct", lambda *args: _Direct((), (), copies, ()))  # type: ignore[arg-type]
    monkeypatch.setattr(Routine, "check", lambda *args: None)
    theirs, ours = object(), object()
    for targets in (Targets({}, [], key=ours, inference=False), dict[str, torch.Tensor]()):
        replay = Replay(Routine(SimpleNamespace(), ((),), ()), targets)  # type: ignore[arg-type]
        replay._copy(plan.buckets[0], Views([], (), key=theirs))
    assert given == [(theirs, ours), (theirs, None)]


def test_devices_are_collected_once_for_each_bucket_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def collect(memories: Sequence[torch.Tensor]) -> Sequence[torch.device]:
        seen.append(len(memories))
        return ()

    monkeypatch.setattr(inproc, "_cuda_devices", collect)
    plan = Plan.pack([TensorSpec(name=name, shape=(1024,), dtype=torch.float32) for name in "ab"], 4096)
    assert len(plan.buckets) == 2
    sender = InprocTransport().sender(slot_bytes=4096, num_slots=1, receivers=1, generation=1)
    first, places = object(), (WHOLE,)
    for key in (first, first, object(), None, None):
        for bucket, width in zip(plan.buckets, (1, 2), strict=True):
            sender.hand_over(bucket, Views([torch.zeros(1)] * width, places, key=key))
    assert seen == [1, 2] * 4
    sender.close()
