"""The pipe to a program on another GPU, as far as it goes without one."""

import threading
from multiprocessing import Pipe

import pytest

from wsync import wire
from wsync.bench.gpu.far import Far
from wsync.bench.gpu.far_end import answer
from wsync.bench.gpu.raw_peer import sizes_of
from wsync.errors import PeerError
from wsync.memory.sizes import GIB

PATIENCE_S = 30.0


class Methods:
    def double(self, number: int) -> int:
        return 2 * number

    def fail(self) -> None:
        raise RuntimeError("on purpose")


def test_answers_come_in_order_until_one_fails() -> None:
    ours, theirs = Pipe()
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            answer(theirs, Methods())
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    for words in (("double", 3), ("double", 4), ("fail",)):
        ours.send_bytes(wire.pack(words))
    said = [wire.unpack(ours.recv_bytes()) for _ in range(4)]
    thread.join(PATIENCE_S)
    assert said[:3] == [("done", None), ("done", 6), ("done", 8)]
    assert said[3][0] == "failed"  # type: ignore[index]
    assert [str(error) for error in raised] == ["on purpose"]


def test_a_program_that_ends_is_told_by_name() -> None:
    with Far("wsync.bench.gpu.no_such_program") as far, pytest.raises(PeerError, match="no_such_program died"):
        far.hear()


def test_buffers_take_all_bytes() -> None:
    assert sizes_of(2 * GIB + 5) == [GIB, GIB, 5]
    assert sizes_of(GIB) == [GIB]
