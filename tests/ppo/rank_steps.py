"""What the tests have two ranks do."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from integrations.ppo.arguments import Arguments, parse
from integrations.ppo.engines.base import Completion, SamplingParams
from integrations.ppo.strategy import get_strategy
from integrations.ppo.train import build, close, shared_folder
from integrations.ppo.trainer import Trainer, get_trainer_cls, register_trainer
from tests.ppo.jobs import SMALL
from tests.ppo.states import digest
from wsync.testing.launched import as_under_torchrun
from wsync.testing.ranks import Rank

Facts = dict[str, Any]


def arguments(options: str) -> Arguments:
    """Of a small run."""
    return parse([*SMALL.split(), *options.split()])


def built(me: Rank, options: str, folder: Path) -> Trainer:
    """A trainer on this rank, whose own random states differ from those of others."""
    as_under_torchrun(me)
    torch.manual_seed(me.rank)
    random.seed(me.rank)
    return build(arguments(options), folder)


def trained(me: Rank, options: str) -> Facts:
    """Run to the end: the state before and after, and what an evaluation says then."""
    with shared_folder() as folder:
        trainer = built(me, options, folder)
        facts: Facts = {"first step": trainer.step, "before": digest(trainer)}
        trainer.fit()
        facts |= {"after": digest(trainer), "numbers": trainer.evaluate()}
        close(trainer.strategy)
    return facts


def evaluated(me: Rank, options: str) -> Facts:
    """Train a step, evaluate twice."""
    with shared_folder() as folder:
        trainer = built(me, options, folder)
        trainer.fit()
        facts: Facts = {"before": digest(trainer)}
        facts["numbers"] = trainer.evaluate()
        facts["after"] = digest(trainer)
        facts["again"] = trainer.evaluate()
        facts["prompts"] = [trainer.evaluation[index].text for index in range(len(trainer.evaluation))]
        close(trainer.strategy)
    return facts


def watched(me: Rank, options: str) -> list[tuple[str, str | None, list[str]]]:
    """Run, and tell (hook, phase, residents that are on the device) of every hook that was called, in order."""
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
        trainer.fit()
        close(trainer.strategy)
    return seen


def resumed_with(me: Rank, options: str) -> str:
    """What a trainer says that is built with these."""
    with shared_folder() as folder:
        try:
            built(me, options, folder)
        except ValueError as error:
            return str(error)
    return "nothing"


class Adder:
    """An engine whose answer is the sum of the prompt and the rank that the seed belongs to."""

    handle = None
    batch = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        """See `InferenceEngine`."""
        self.batch = len(prompts)
        pairs = zip(prompts, seeds, strict=True)
        return [Completion(token_ids=[sum(prompt), seed // 100], log_probs=[-1.0, -1.0]) for prompt, seed in pairs]

    def close(self) -> None:
        """See `InferenceEngine`."""


def gathered(me: Rank) -> tuple[list[list[int]], list[list[int]], int]:
    """(prompts of this rank, its answers, how many prompts its engine got)."""
    strategy = get_strategy(arguments("--fsdp --engine_tp_size 2 --train_batch_size 64"))
    strategy.inference_engine = adder = Adder()
    asked = [[me.rank, 10 * index] for index in range((3, 1, 0, 5)[me.rank])]
    params = SamplingParams(max_new_tokens=2, temperature=1.0, seed=100 * me.rank, stop_token_id=None)
    answers = strategy.gather_and_generate(params, asked)
    return asked, [answer.token_ids for answer in answers], adder.batch
