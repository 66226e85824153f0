"""The transport that the documentation shows is short, and passes the shipped conformance kit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import examples.file_transport
from examples.file_transport import FileTransport
from wsync.errors import TransportError
from wsync.testing.bench import Bench
from wsync.testing.conformance import TRANSPORT_CHECKS


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Bench], None], tmp_path: Path) -> None:
    check(Bench(make=partial(FileTransport, str(tmp_path)), processes=True))
    assert not list(tmp_path.iterdir()), "a file was left behind"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"cannot make a file in .*nowhere"):
        FileTransport(str(tmp_path / "nowhere")).sender(slot_bytes=4096, num_slots=2, receivers=1, generation=1)


def test_it_is_short() -> None:
    source = examples.file_transport.__file__
    assert source is not None
    assert len(Path(source).read_text().splitlines()) < 150
