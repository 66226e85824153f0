"""Syncs of the trainer: what carries them, how much of it, and what is left of one that fails."""

import pytest

from tests.ppo.sync_steps import carried, failed, unserved
from wsync.testing.ranks import run_ranks

RUN = "--fsdp --engine_type hf"


@pytest.mark.slow
def test_shards_are_gathered_once_in_the_engines_dtype_by_what_was_asked_for() -> None:
    """R78: a trainer was seen to gather twice, and to send what the engine casts. R81: one to change the transport."""
    runs = [RUN, f"{RUN} --bf16", f'{RUN} --sync_args {{"transport":"shm"}}']
    for plain, low, shm in run_ranks(carried, 2, runs, timeout_s=120):
        assert [facts["transport"] for facts in (plain, low, shm)] == ["inproc", "inproc", "shm"]
        for facts, width in ((plain, 4), (low, 2), (shm, 4)):
            assert width * facts["weights"] <= facts["nbytes"] < 1.01 * width * facts["weights"], "and few buffers"
            assert width * facts["held"] <= facts["sent"] < 1.1 * width * facts["held"], "the other rank lacks a half"


@pytest.mark.slow
def test_a_transport_that_cannot_serve_is_an_error() -> None:
    """R81: nothing else is taken in its place."""
    for words in run_ranks(unserved, 2, f'{RUN} --sync_args {{"transport":"nccl"}}', timeout_s=120):
        assert "no transport serves" in words
        assert "shm: nccl was asked for" in words


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("bucket", [0, 2])
def test_a_sync_that_fails(bucket: int, level: int) -> None:
    """R80 and R82: everything stays in a phase that says so; an engine with a mixture does not answer; syncs heal.

    At level 2 the engine has no weights to go on with, and waking it is a sync.
    """
    for facts in run_ranks(failed, 2, f"{RUN} --engine_sleep_level {level}", bucket, timeout_s=120):
        assert "no room to pack" in facts["said"]
        assert (facts["phase"], facts["status"]) == ("sync", "SLEEPED")
        assert facts["healed"] != facts["before"]
        if level == 2:
            assert (facts["refused"], facts["answer"]) == ("nothing", facts["healed"])
        elif bucket == 0:
            assert (facts["refused"], facts["answer"]) == ("nothing", facts["before"])
        else:
            assert facts["answer"] == "none"
            assert "cannot generate" in facts["refused"]
        assert facts["again"] == "SyncReport"
        assert facts["variables"], "of the allocator, say"
