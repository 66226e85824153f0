"""What the tests of memory have two ranks do."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch.distributed as dist

import wsync
from integrations.ppo import models
from integrations.ppo.shards import shards
from integrations.ppo.strategy import get_strategy
from integrations.ppo.train import close, shared_folder
from integrations.ppo.trainer import Trainer, get_trainer_cls, register_trainer
from tests.ppo.rank_steps import Facts, arguments, built
from tests.ppo.strategy_steps import GREEDY, words_of
from wsync.testing.ranks import Rank


def watched(me: Rank, options: str) -> list[tuple[str, str | None, list[str]]]:
    """Run, and tell (hook, phase, what is on the device) of every hook in order, and of the first backward."""
    seen: list[tuple[str, str | None, list[str]]] = []
    base = get_trainer_cls("sync")

    def watcher(name: str) -> Any:
        def hook(self: Trainer) -> None:
            getattr(base, name)(self)
            memory = self.strategy.memory
            assert memory is not None
            seen.append((name, memory.phase, sorted(memory.present)))

        return hook

    hooks = {name: watcher(name) for name in dir(base) if name.startswith("on_")}
    register_trainer("watched")(type("Watched", (base,), hooks))
    with shared_folder() as folder:
        trainer = built(me, f"{options} --trainer watched", folder)
        strategy, memory = trainer.strategy, trainer.strategy.memory
        assert memory is not None
        backward = strategy.backward

        def once(*args: Any) -> None:
            if seen[-1][0] != "backward":
                seen.append(("backward", memory.phase, sorted(memory.present)))
            backward(*args)

        strategy.backward = once  # type: ignore[assignment, method-assign]
        trainer.fit()
        close(strategy)
    return seen


def placed(me: Rank, runs: Sequence[str]) -> list[Facts]:
    """Of each run: meshes and offload policies of its models, what its manager moves, what moving the actor says."""
    found = []
    for options in runs:
        with shared_folder() as folder:
            strategy = built(me, options, folder).strategy
            assert strategy.memory is not None
            facts: Facts = {"meshes": {}, "policies": {}, "residents": sorted(strategy.memory.residents)}
            facts["sizes"] = dict(strategy.memory.sizes)
            for name, role in strategy.roles.items():
                group = role.model._get_fsdp_state()._fsdp_param_group
                facts["meshes"][name] = tuple(group.mesh_info.mesh.shape)
                facts["policies"][name] = type(group.offload_policy).__name__
            facts["moved"] = "nothing"
            actor = strategy.roles["actor"].model
            try:
                strategy.reload_model(actor)
            except ValueError as error:
                facts["moved"] = str(error)
            strategy.offload_model(actor)
            close(strategy)
        found.append(facts)
    return found


def engine_states(me: Rank, options: str) -> Facts:
    """The engine's status after each call, and what it answers to one prompt when the actor has changed meanwhile."""
    with shared_folder() as folder:
        strategy = get_strategy(arguments(f"--fsdp --engine_type hf {options}"))
        args, policy = strategy.args, models.policy(strategy.args)
        policy.save_pretrained(folder)
        dist.barrier()
        actor = strategy.prepare("actor", policy, 0.0).model
        states: dict[str, str] = {}
        facts: Facts = {"states": states}

        def note(when: str) -> None:
            states[when] = f"{strategy.inference_engine_status.name} {strategy.inference_engine_status.value}"

        def answer(when: str, *, sleep_engine: bool = True) -> None:
            (said,) = strategy.gather_and_generate(GREEDY, [[50, 60, 70]], sleep_engine=sleep_engine)
            facts[when] = said.output_token_ids

        note("no engine")
        with redirect_stdout(io.StringIO()) as printed:
            facts["without an engine"] = (strategy.update_engine_weights(actor), printed.getvalue())
        strategy.setup_inference_engine(args, "hf", actor, folder)
        note("set up")
        if strategy.is_rank_0:
            for file in folder.iterdir():
                file.unlink()  # nothing that comes back is read from here again
        dist.barrier()
        answer("set up")
        for shard in shards(actor):
            shard.neg_()
        for when in ("woken", "woken again"):
            strategy.wakeup_inference_engine()
            note(when)
        answer("woken", sleep_engine=False)
        strategy.maybe_sleep_inference_engine()
        note("sent to sleep")
        answer("woken")
        note("generated")
        answer("woken", sleep_engine=False)
        note("generated, kept awake")
        strategy.update_engine_weights(actor)
        note("synced")
        answer("synced")
        close(strategy)
    return facts


def synced(me: Rank, runs: Sequence[str]) -> list[int]:
    """How many syncs each of several runs makes, from when its engine is there to its end."""
    found, plain = [], wsync.sync
    for options in runs:
        calls: list[object] = []

        def counted(*args: Any, calls: list[object] = calls, **more: Any) -> wsync.SyncReport:
            calls.append(args)
            return plain(*args, **more)

        with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(wsync, "sync", counted)
            trainer = built(me, options, folder)
            trainer.fit()
            close(trainer.strategy)
        found.append(len(calls))
    return found


def parted(me: Rank, options: str, *calls: str) -> str:
    """What is said when each rank makes another call."""
    with shared_folder() as folder:
        strategy = built(me, f"--fsdp --engine_type hf {options}", folder).strategy
        actor = strategy.roles["actor"]
        known: dict[str, Callable[[], Any]] = {
            "train": lambda: strategy.maybe_load_optimizer(actor.optimizer),
            "score": strategy.maybe_sleep_inference_engine,
            "sync": lambda: strategy.update_engine_weights(actor.model),
            "generate": lambda: strategy.gather_and_generate(GREEDY, [[50]]),
        }
        return words_of(known[calls[me.rank]])


def waited(me: Rank) -> str:
    """One rank trains, and the other one does not come until it has given up."""
    said = "nothing"
    with shared_folder() as folder:
        trainer = built(me, "--fsdp --engine_type hf --timeout_s 5", folder)
        if me.rank == 0:
            said = words_of(lambda: trainer.strategy.enter("train"))
        dist.barrier()
    return said
