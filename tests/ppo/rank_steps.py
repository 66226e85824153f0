"""What the tests have two ranks do."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from integrations.ppo.arguments import Arguments, parse
from integrations.ppo.engines import start_engine
from integrations.ppo.engines.base import Completion, SamplingParams
from integrations.ppo.experience import Rollout
from integrations.ppo.export import export
from integrations.ppo.groups import EngineGroup
from integrations.ppo.monitor import Monitor
from integrations.ppo.shards import shards
from integrations.ppo.strategy import get_strategy
from integrations.ppo.train import build, close, shared_folder
from integrations.ppo.trainer import Trainer
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
        generate, asked = trainer.strategy.gather_and_generate, []

        def noted(params: SamplingParams, *more: Any, **others: Any) -> list[Completion]:
            asked.append(params.temperature)
            return generate(params, *more, **others)

        trainer.strategy.gather_and_generate = noted  # type: ignore[assignment, method-assign]
        facts["numbers"], facts["temperatures"] = trainer.evaluate(), asked
        facts["after"] = digest(trainer)
        facts["again"] = trainer.evaluate()
        facts["prompts"] = [trainer.evaluation[index].text for index in range(len(trainer.evaluation))]
        close(trainer.strategy)
    return facts


def resumed_with(me: Rank, options: str) -> str:
    """What a trainer says that is built with these."""
    with shared_folder() as folder:
        try:
            built(me, options, folder)
        except ValueError as error:
            return str(error)
    return "nothing"


class Adder:
    """An engine whose answer is the sum of the prompt and the rank that the seed belongs to. It wants a prompt."""

    handle = None
    batch = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        """See `InferenceEngine`."""
        assert prompts, "engines need not take a batch without prompts"
        self.batch = len(prompts)
        pairs = zip(prompts, seeds, strict=True)
        said = [-1.0, -1.0]
        return [
            Completion(prompt_token_ids=[*prompt], output_token_ids=[sum(prompt), seed // 100], log_probs=said)
            for prompt, seed in pairs
        ]

    def close(self) -> None:
        """See `InferenceEngine`."""


def gathered(me: Rank) -> Facts:
    """Prompts of this rank, its answers, how many prompts its engine got, answers to texts, and to next to nothing."""
    strategy = get_strategy(arguments("--fsdp --engine_tp_size 2 --train_batch_size 64"))
    strategy.inference_engine = adder = Adder()
    asked = [[me.rank, 10 * index] for index in range((3, 1, 0, 5)[me.rank])]
    params = SamplingParams(max_new_tokens=2, temperature=1.0, seed=100 * me.rank, stop_token_id=None)
    answers = strategy.gather_and_generate(params, asked)
    facts: Facts = {"asked": asked, "answers": answers, "batch": adder.batch}
    facts["to texts"] = strategy.gather_and_generate(params, all_prompts=["a", "0123456789"][: me.rank])
    only_first: list[list[int]] = [[1]] if me.rank == 0 else []
    facts["fewer"] = [strategy.gather_and_generate(params, some) for some in (only_first, [])]
    for name, prompts in {"neither": (None, None), "both": (asked, ["a"])}.items():
        try:
            strategy.gather_and_generate(params, *prompts)
        except ValueError as error:
            facts[name] = str(error)
    return facts


def judged(me: Rank, folders: list[str]) -> Facts:
    """What reward models say about answers of which ranks have different numbers, and who was on the device then."""
    with shared_folder() as folder:
        trainer = built(
            me, f"--fsdp --engine_type hf --offload_models --adam_offload --reward {' '.join(folders)}", folder
        )
        strategy = trainer.strategy
        memory = strategy.memory
        assert memory is not None
        seen: list[list[str]] = []
        for name, role in strategy.roles.items():
            if name.startswith("reward"):
                role.model.register_forward_pre_hook(lambda *_: seen.append(sorted(memory.present)))
        strategy.enter("score")
        rollouts = [text_rollout(text) for text in JUDGED[me.rank]]
        said = trainer.maker.rewards(rollouts).tolist()
        close(strategy)
    return {"said": said, "seen": seen, "afterwards": sorted(memory.present)}


JUDGED: tuple[list[str], ...] = (["a", "bcd", "e" * 9], [])
"""Answers by rank."""


def text_rollout(text: str) -> Rollout:
    """A rollout of which a reward model reads the text."""
    return Rollout(prompt="prompt ", response=text, prompt_ids=[5], response_ids=[7], engine_log_probs=[-1.0])


class Recorder(Monitor):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("", 0, active=False)
        self.lines: list[Mapping[str, float]] = []

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """See `Monitor`."""
        self.lines.append(numbers)


def numbers(me: Rank, runs: Sequence[str]) -> list[list[Mapping[str, float]]]:
    """What each of several runs logs."""
    found = []
    for options in runs:
        with shared_folder() as folder:
            trainer = built(me, options, folder)
            trainer.monitor = recorder = Recorder()
            trainer.fit()
            close(trainer.strategy)
        found.append(recorder.lines)
    return found


def averaged(me: Rank, options: str) -> Facts:
    """A run with an average, and that average of full weights by hand, update by update."""
    with shared_folder() as folder:
        trainer = built(me, options, folder)
        actor = trainer.strategy.roles["actor"].model
        by_hand = [shard.clone() for shard in shards(actor)]
        assert trainer.average is not None
        update = trainer.average.update

        def both() -> None:
            update()
            for mean, shard in zip(by_hand, shards(actor), strict=True):
                mean.mul_(0.5).add_(shard, alpha=0.5)

        trainer.average.update = both  # type: ignore[method-assign]
        trainer.fit()
        weights = [shard.clone() for shard in shards(actor)]
        with trainer.average.swapped():
            found = [shard.clone() for shard in shards(actor)]
        back = all(torch.equal(one, two) for one, two in zip(weights, shards(actor), strict=True))
        close(trainer.strategy)
    return {
        "equal": all(torch.allclose(one, two, atol=1e-6) for one, two in zip(by_hand, found, strict=True)),
        "differs": any(not torch.equal(one, two) for one, two in zip(weights, found, strict=True)),
        "back": back,
    }


def roles(me: Rank, runs: Sequence[str]) -> list[list[str]]:
    """Which models each of several runs has."""
    found = []
    for options in runs:
        with shared_folder() as folder:
            strategy = built(me, options, folder).strategy
            found.append(sorted(strategy.roles))
            close(strategy)
    return found


def beside_fresh(me: Rank, options: str) -> Facts:
    """After a sync: the engine beside one that was started on the same weights, from a checkpoint of the actor."""
    with shared_folder() as folder:
        trainer = built(me, options, folder)
        trainer.fit()
        strategy = trainer.strategy
        saved = folder / "saved"
        export(trainer.args, strategy, trainer.maker.tokenizer, saved)
        dist.barrier()
        fresh = start_engine(trainer.args, saved, strategy.device, EngineGroup(1))
        params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=7, stop_token_id=1)
        prompts = [[40, 50, 60], [100 + me.rank], [70, 71]]
        ours = strategy.gather_and_generate(params, prompts, sleep_engine=False)
        theirs = fresh.generate(prompts, [7, 8, 9], params)
        dtypes = {str(one.dtype) for one in strategy.roles["actor"].model.parameters()}
        close(strategy)
    return {"ours": ours, "theirs": theirs, "dtypes": dtypes}
