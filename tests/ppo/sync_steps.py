"""What the tests of the trainer's syncs have two ranks do."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import wsync
from integrations.ppo.shards import shards
from integrations.ppo.train import close, shared_folder
from tests.ppo.rank_steps import Facts, built
from tests.ppo.strategy_steps import GREEDY, words_of
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.group import Group
from wsync.testing.ranks import Rank


def carried(me: Rank, runs: Sequence[str]) -> list[Facts]:
    """Of the sync after a step, in each of several runs: what carried it, its bytes, and those that this rank sent."""
    found, plain = [], Group.transfer
    for options in runs:
        sent: list[int] = []

        def counted(group: Group, sends: Any, *more: Any, sent: list[int] = sent) -> None:
            sent.extend(tensor.nbytes for _, tensor in sends)
            plain(group, sends, *more)

        with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
            strategy = built(me, options, folder).strategy
            actor = strategy.roles["actor"].model
            patch.setattr(Group, "transfer", counted)
            report = strategy.update_engine_weights(actor)
            assert report is not None
            facts: Facts = {"transport": report.transport, "nbytes": report.nbytes, "sent": sum(sent)}
            facts["held"] = sum(shard.numel() for shard in shards(actor))
            facts["weights"] = sum(one.numel() for one in actor.parameters())
            close(strategy)
        found.append(facts)
    return found


def unserved(me: Rank, options: str) -> str:
    """What is said when the transport that was asked for cannot serve."""
    with shared_folder() as folder:
        return words_of(lambda: built(me, options, folder))


def failed(me: Rank, options: str, bucket: int) -> Facts:
    """Rank 1 cannot stage a bucket of a sync: what is said, how things stand then, what the engine answers, ..."""
    with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
        strategy = built(me, f'{options} --sync_args {{"bucket_bytes":32768}}', folder).strategy
        variables = dict(os.environ)
        actor, memory = strategy.roles["actor"].model, strategy.memory
        assert memory is not None

        def answer() -> list[int]:
            (said,) = strategy.gather_and_generate(GREEDY, [[50, 60, 70]])
            return said.output_token_ids

        facts: Facts = {"before": answer()}
        for shard in shards(actor):
            shard.neg_()
        healthy = ShardedProducer.stage

        def stage(self: ShardedProducer, one: wsync.Bucket, slot: torch.Tensor | None) -> None:
            if me.rank == 1 and one.index == bucket:
                raise wsync.TransportError("no room to pack")
            healthy(self, one, slot)

        patch.setattr(ShardedProducer, "stage", stage)
        facts["said"] = words_of(lambda: strategy.update_engine_weights(actor))
        patch.undo()
        facts["phase"], facts["status"] = memory.phase, strategy.inference_engine_status.name
        facts["answer"] = "none"
        facts["refused"] = words_of(lambda: facts.update(answer=answer()))
        facts["again"] = type(strategy.update_engine_weights(actor)).__name__
        facts["healed"] = answer()
        facts["variables"] = dict(os.environ) == variables
        close(strategy)
    return facts
