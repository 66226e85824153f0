"""`wsync.sync` from several real trainer ranks: FSDP2 into engines, and what happens when a rank fails."""

import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import wsync
from wsync.adapters.engines.hf import HFEngine
from wsync.adapters.trainers.exchange import Exchange
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.testing.ranks import Rank, run_ranks

CONFIG = wsync.SyncConfig(bucket_bytes=32 << 10, timeout_s=20.0)
PROMPTS = [[3, 1, 4, 1, 5]]


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def sharded(seed: int) -> LlamaForCausalLM:
    model = llama(seed)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def optimizer_step(model: nn.Module) -> None:
    """One real step on every rank: the trainer's own collectives run, and every weight moves."""
    tokens = torch.randint(1, 256, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    model.zero_grad()


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """*Collective.* The actor's weights by the trainer's own means."""
    tensors = dict(model.named_parameters())
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in tensors.items()}


@contextmanager
def launched_on_rank_zero(me: Rank) -> Iterator[HFEngine | None]:
    """An engine in another process, owned by rank 0, on the weights of seed 0. All ranks leave here together."""
    if me.rank:
        dist.barrier()
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        llama(0).save_pretrained(folder)
        with HFEngine.launch(folder) as engine:
            dist.barrier()
            yield engine


def check_engine(engine: HFEngine, expected: dict[str, torch.Tensor]) -> None:
    for name, wanted in expected.items():
        assert torch.equal(engine.read(name)[0], wanted), name


def three_syncs_with_steps_between(me: Rank) -> int:
    actor = sharded(1)
    with launched_on_rank_zero(me) as engine:
        for turn in (1, 2, 3):
            optimizer_step(actor)
            with torch.no_grad():  # leaves the root unsharded
                actor(input_ids=torch.tensor([[1, 2, 3]]))
            report = wsync.sync(actor, engine, config=replace(CONFIG, verify="digest"))
            assert report.version == turn
            expected = full_state(actor)
            if engine is not None:
                check_engine(engine, expected)
        return report.tensors


def every_rank_owns_an_engine(me: Rank) -> str:
    actor, model = sharded(1), llama(100 + me.rank)
    report = wsync.sync(actor, model, config=CONFIG)
    expected = full_state(actor)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    return report.transport


def copies_have_come_apart(me: Rank) -> str:
    """A weight that both have whole is another one on rank 1, as after a step that did not reduce its gradient."""
    actor, model = llama(1), llama(100 + me.rank)
    with torch.no_grad():
        actor.model.norm.weight += me.rank
    with pytest.raises(wsync.WsyncError) as caught:
        wsync.sync(actor, model, config=replace(CONFIG, verify="digest"))
    return f"{caught.type.__name__}: {caught.value}"


def a_rank_fails_at_bucket_two(me: Rank) -> tuple[str, str]:
    """Rank 1 cannot stage bucket 2: all stop there, the engine is torn, training goes on, the next sync heals."""
    actor = sharded(1)
    words = serving = ""
    with launched_on_rank_zero(me) as engine:
        wsync.sync(actor, engine, config=CONFIG)
        healthy = ShardedProducer.stage

        def stage(self: ShardedProducer, bucket: wsync.Bucket, slot: torch.Tensor | None) -> None:
            if me.rank == 1 and bucket.index == 2:
                raise MemoryError("no room to pack bucket 2")
            healthy(self, bucket, slot)

        optimizer_step(actor)
        ShardedProducer.stage = stage  # type: ignore[method-assign]
        try:
            wsync.sync(actor, engine, config=CONFIG)
        except (wsync.RankError, MemoryError) as error:
            words = f"{type(error).__name__}: {error}"
        ShardedProducer.stage = healthy  # type: ignore[method-assign]
        if engine is not None:
            with pytest.raises(wsync.EngineStateError) as caught:
                engine.generate(PROMPTS, max_new_tokens=4)
            serving = str(caught.value)
        optimizer_step(actor)
        assert wsync.sync(actor, engine, config=CONFIG).version == 2
        expected = full_state(actor)
        if engine is not None:
            check_engine(engine, expected)
            engine.generate(PROMPTS, max_new_tokens=4)
    return words, serving


class Unreadable(dict[str, torch.Tensor]):
    """Local parameters that cannot be read any more after `reads` times: the copy out of them runs out of memory."""

    reads = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        Unreadable.reads -= 1
        if Unreadable.reads == 0:
            raise MemoryError("no room to cast")
        return super().__getitem__(name)


def local_steps_fail(me: Rank) -> list[str]:
    """Copies out of the parameters that fail on one rank, into the sender's slot or into a packet for it."""
    actor, engine = sharded(1), llama(0) if me.rank == 0 else None
    wsync.sync(actor, engine, config=CONFIG)
    healthy, heard = Exchange.stage, []

    def stage(self: Exchange, tensors: Mapping[str, torch.Tensor], *args: Any) -> None:
        healthy(self, Unreadable(tensors), *args)

    for failing in (0, 1):
        Unreadable.reads = 6 if me.rank == failing else 0
        Exchange.stage = stage  # type: ignore[method-assign,assignment]
        with pytest.raises((wsync.RankError, MemoryError)) as caught:
            wsync.sync(actor, engine, config=CONFIG)
        Exchange.stage = healthy  # type: ignore[method-assign]
        heard.append(f"{type(caught.value).__name__}: {caught.value}")
        optimizer_step(actor)
        wsync.sync(actor, engine, config=CONFIG)
    expected = full_state(actor)
    for name, parameter in engine.named_parameters() if engine is not None else ():
        assert torch.equal(parameter, expected[name]), name
    return heard


class Odd(nn.Module):
    """Shards that begin and end in the middle of 8 bytes, and what an engine must have."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.bias = nn.Linear(3, 5, dtype=torch.bfloat16), nn.Parameter(torch.randn(7))

    def generate(self) -> None:
        """Never called."""


def digests_of_odd_shards(me: Rank) -> dict[str, int]:
    """The words of a digest must be the same on both sides, though workers are not told who owns what."""
    torch.manual_seed(3)
    actor, engine = Odd(), Odd() if me.rank == 0 else None
    fully_shard(actor)
    with wsync.connect(actor, engine, config=replace(CONFIG, verify="digest", transport="shm")) as session:
        session.sync()
        plan = session._agreement.plan
    expected = full_state(actor)
    for name, parameter in engine.named_parameters() if engine is not None else ():
        assert torch.equal(parameter, expected[name]), name
    return {spec.name: spec.word_bytes for spec in plan.specs}


def a_rank_stays_away(me: Rank) -> tuple[str, bool]:
    """Rank 1 does not call: it is named, the engine keeps its version and serves, and the call after that works."""
    actor = sharded(1)
    short = replace(CONFIG, timeout_s=3.0)
    words, same = "", True
    with launched_on_rank_zero(me) as engine:
        wsync.sync(actor, engine, config=short)
        if me.rank == 0:
            assert engine is not None
            answer = engine.generate(PROMPTS, max_new_tokens=4)
            with pytest.raises(wsync.RankError) as caught:
                wsync.sync(actor, engine, config=short)
            words = f"{caught.value.ranks} {caught.value}"
            same = engine.generate(PROMPTS, max_new_tokens=4) == answer
        dist.barrier()
        if me.rank == 1:  # comes now, and is told so
            with pytest.raises(wsync.RankError):
                wsync.sync(actor, engine, config=short)
        dist.barrier()
        wsync.sync(actor, engine, config=short)
    return words, same


def the_engine_is_killed(me: Rank) -> str:
    """SIGKILL of the engine's process in the middle: an error on every rank, and the trainer's collectives go on."""
    actor = sharded(1)
    with launched_on_rank_zero(me) as engine:
        wsync.sync(actor, engine, config=CONFIG)
        healthy = ShardedProducer.stage

        def stage(self: ShardedProducer, bucket: wsync.Bucket, slot: torch.Tensor | None) -> None:
            if engine is not None and bucket.index == 2 and engine.pid is not None:
                os.kill(engine.pid, signal.SIGKILL)
            healthy(self, bucket, slot)

        ShardedProducer.stage = stage  # type: ignore[method-assign]
        with pytest.raises((wsync.PeerError, wsync.RankError)) as caught:
            wsync.sync(actor, engine, config=CONFIG)
        ShardedProducer.stage = healthy  # type: ignore[method-assign]
        optimizer_step(actor)
    return f"{type(caught.value).__name__}: {caught.value}"


def a_rank_is_killed(me: Rank) -> tuple[str, bool]:
    """SIGKILL of trainer rank 1 in the middle: rank 0 has an error within the deadline; the engine does not serve."""
    actor = sharded(1)
    with launched_on_rank_zero(me) as engine:
        wsync.sync(actor, engine, config=replace(CONFIG, timeout_s=4.0))
        healthy = ShardedProducer.stage

        def stage(self: ShardedProducer, bucket: wsync.Bucket, slot: torch.Tensor | None) -> None:
            if me.rank == 1 and bucket.index == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            healthy(self, bucket, slot)

        ShardedProducer.stage = stage  # type: ignore[method-assign]
        with pytest.raises(wsync.WsyncError) as caught:
            wsync.sync(actor, engine, config=replace(CONFIG, timeout_s=4.0))
        assert engine is not None
        with pytest.raises(wsync.EngineStateError):
            engine.generate(PROMPTS, max_new_tokens=4)
        return str(caught.value), True


def the_engine_is_replaced(me: Rank) -> list[int]:
    """Rank 0 passes another engine, then a third one after dropping that; rank 1 passes None all the time."""
    actor = sharded(1)
    first = llama(0) if me.rank == 0 else None
    versions = [wsync.sync(actor, first, config=CONFIG).version]
    second = llama(2) if me.rank == 0 else None
    versions.append(wsync.sync(actor, second, config=CONFIG).version)
    versions.append(wsync.sync(actor, first, config=CONFIG).version)
    del second
    third = llama(3) if me.rank == 0 else None
    versions.append(wsync.sync(actor, third, config=CONFIG).version)
    expected = full_state(actor)
    for model in (first, third):
        for name, parameter in model.named_parameters() if model is not None else ():
            assert torch.equal(parameter, expected[name]), name
    return versions


def a_call_is_skipped(me: Rank) -> int:
    """Rank 1 fails in code of its own before one of its syncs; after that both go on as if nothing had been."""
    actor, engine = sharded(1), llama(0) if me.rank == 0 else None
    short = replace(CONFIG, timeout_s=2.0)
    wsync.sync(actor, engine, config=short)
    if me.rank == 0:
        with pytest.raises(wsync.RankError):
            wsync.sync(actor, engine, config=short)
    dist.barrier()
    wsync.sync(actor, engine, config=short)
    return wsync.sync(actor, engine, config=short).version


def configurations_differ(me: Rank) -> str:
    config = replace(CONFIG, bucket_bytes=(32 + me.rank) << 10)
    with pytest.raises(wsync.ConfigError) as caught:
        wsync.connect(sharded(1), llama(0) if me.rank == 0 else None, config=config)
    return str(caught.value)


def nobody_has_an_engine(me: Rank) -> str:
    with pytest.raises(wsync.ConfigError) as caught:
        wsync.connect(sharded(1), None, config=CONFIG)
    return str(caught.value)


def one_rank_has_an_unknown_engine(me: Rank) -> str:
    with pytest.raises((wsync.UnsupportedError, wsync.RankError)) as caught:
        wsync.connect(sharded(1), object() if me.rank == 1 else None, config=CONFIG)
    assert wsync.sync(sharded(1), llama(0) if me.rank == 0 else None, config=CONFIG).version == 1
    return f"{type(caught.value).__name__}: {caught.value}"


def bad_calls(me: Rank) -> list[str]:
    """Several short cases in one pair of processes."""
    assert the_engine_is_replaced(me) == [1, 1, 2, 1]
    assert a_call_is_skipped(me) == 3
    return [configurations_differ(me), nobody_has_an_engine(me), one_rank_has_an_unknown_engine(me)]


def test_fsdp2_into_another_process_three_times() -> None:
    first, second = run_ranks(three_syncs_with_steps_between, 2, timeout_s=120)
    assert first == second > 20


def test_an_engine_on_every_rank_takes_the_gathered_weights_in_process() -> None:
    assert run_ranks(every_rank_owns_an_engine, 2, timeout_s=120) == ["inproc", "inproc"]


def test_digests_find_a_weight_that_is_not_the_same_on_all_ranks() -> None:
    first, second = run_ranks(copies_have_come_apart, 2, timeout_s=120)
    assert first.startswith("RankError: stopped before phase 'compare digests'")
    assert second.startswith("DigestError")
    assert all("model.norm.weight" in words for words in (first, second))


def test_a_failing_rank_stops_all_between_collectives_and_the_next_sync_heals() -> None:
    (heard, refusal), (own, _) = run_ranks(a_rank_fails_at_bucket_two, 2, timeout_s=120)
    assert heard.startswith("RankError: stopped before phase 'bucket 2': rank 1: MemoryError: no room to pack")
    assert own == "MemoryError: no room to pack bucket 2"
    assert "refuses to serve" in refusal


def test_every_local_step_is_done_before_peers_wait_for_its_outcome() -> None:
    first, second = run_ranks(local_steps_fail, 2, timeout_s=120)
    assert first[0] == second[1] == "MemoryError: no room to cast"
    for words, rank in ((second[0], 0), (first[1], 1)):
        assert re.match(rf"RankError: stopped before phase 'bucket \d+': rank {rank}: MemoryError: no room", words), (
            words
        )


def test_digests_agree_where_shards_are_no_whole_words() -> None:
    first, second = run_ranks(digests_of_odd_shards, 2, timeout_s=120)
    assert first == second == {"rows.weight": 2, "rows.bias": 2, "bias": 4}


def test_a_rank_that_stays_away_is_named_and_nothing_is_touched() -> None:
    (words, same), _ = run_ranks(a_rank_stays_away, 2, timeout_s=120)
    assert words.startswith("(1,) trainer rank(s) [1] did not reach phase 'sync'")
    assert same, "the engine changed though a rank never came"


def test_a_killed_engine_is_an_error_on_every_rank() -> None:
    owner, other = run_ranks(the_engine_is_killed, 2, timeout_s=120)
    assert owner.startswith("PeerError")
    assert other.startswith("RankError: stopped before phase 'bucket")
    assert "rank 0: PeerError" in other


def test_a_killed_rank_is_an_error_within_the_deadline() -> None:
    (words, refused), _ = run_ranks(a_rank_is_killed, 2, timeout_s=120, expected_dead={1})
    assert "[1]" in words
    assert refused


def test_calls_that_do_not_fit_together_are_errors_on_every_rank() -> None:
    first, second = run_ranks(bad_calls, 2, timeout_s=120)
    for differ, none, _ in (first, second):
        assert "trainer ranks [1] passed another config than rank 0" in differ
        assert "none of the 2 trainer rank(s) passed an engine" in none
    assert first[2].startswith("RankError: stopped before phase 'connect': rank 1: UnsupportedError")
    assert second[2].startswith("UnsupportedError: this engine is a builtins.object")
