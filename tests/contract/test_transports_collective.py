"""The collective transport passes the kit over gloo, and what only it promises."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from wsync.deadline import Deadline
from wsync.plan import Bucket, Plan
from wsync.protocols import Receiver, Ticket
from wsync.testing.bench import Bench
from wsync.testing.chaos import POISON
from wsync.testing.conformance import TRANSPORT_CHECKS
from wsync.testing.samples import bytes_of
from wsync.transports.collective import CollectiveTransport


class Poisoned:
    """A receiver with slots of its own: what was released is poisoned here, as the sender's bench cannot."""

    def __init__(self, inner: Receiver) -> None:
        self._inner = inner
        self.fail, self.close = inner.fail, inner.close

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        for bucket, tensors in self._inner.buckets(plan, deadline):
            yield bucket, tensors
            for tensor in tensors:
                bytes_of(tensor).fill_(POISON)


class Gloo(CollectiveTransport):
    def __init__(self) -> None:
        super().__init__("gloo")

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> Receiver:  # type: ignore[override]
        return Poisoned(super().receiver(ticket, index, deadline))


BENCHES = {
    "processes": Bench(make=Gloo, processes=True),
    "threads": Bench(make=Gloo, processes=False),
}


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES.keys())
def test_conformance(bench: Bench, check: Callable[[Bench], None]) -> None:
    check(bench)
