"""The loop of PPO. When the engine is synced and when it sleeps is what subclasses say, in hooks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wsync
from integrations.ppo.arguments import Arguments
from integrations.ppo.checkpoint import Checkpoints, random_states, set_random_states
from integrations.ppo.experience import Rollout
from integrations.ppo.experience_maker import ExperienceMaker
from integrations.ppo.export import export
from integrations.ppo.kl import KLController
from integrations.ppo.monitor import Monitor
from integrations.ppo.prompts import PromptDataset, PromptStream
from integrations.ppo.replay_buffer import ReplayBuffer
from integrations.ppo.shards import MovingAverage
from integrations.ppo.strategy.base import Strategy
from integrations.ppo.trainer.hooks import Hooks
from integrations.ppo.trainer.updates import update

SEED_STRIDE = 1_000_003
"""Seeds of one iteration are this far from those of the next: more than any iteration has answers."""


class Trainer(Hooks, ABC):
    """Owns the loop; every method is collective. The step is the same in every mode.

    Attributes:
        step: number of the iteration that runs, from 1; 0 before the first.
        report: of this iteration's sync, if it had one.
        average: of the actor's weights, with `--ema_decay`.
    """

    def __init__(
        self,
        args: Arguments,
        strategy: Strategy,
        *,
        maker: ExperienceMaker,
        prompts: PromptStream,
        evaluation: PromptDataset,
        kl: KLController,
        monitor: Monitor,
    ) -> None:
        """Roles and engine are there. Goes on from the newest checkpoint, if there is one."""
        self.args, self.strategy = args, strategy
        self.maker, self.prompts, self.kl, self.monitor = maker, prompts, kl, monitor
        self.evaluation = evaluation
        self.buffer = ReplayBuffer()
        self.step = 0
        self.report: wsync.SyncReport | None = None
        self.average = MovingAverage(strategy.roles["actor"].model, args.ema_decay) if args.ema_decay else None
        self._checkpoints = Checkpoints(args, strategy)
        self._seconds: dict[str, float] = {}
        if self._checkpoints.load(self):
            if not strategy.wakes_by_sync:
                strategy.update_engine_weights(strategy.roles["actor"].model)
            strategy.maybe_sleep_inference_engine()
        self.on_init_end()

    @abstractmethod
    def on_step_end(self) -> None:
        """The models were trained: now the engine may be synced."""

    @abstractmethod
    def on_sample_end(self) -> None:
        """The answers are there: now the engine may sleep."""

    # The loop.

    def fit(self) -> None:
        """Run the iterations that are left."""
        self.on_train_begin()
        with self.monitor:
            if self.args.eval_before_train and not self.step:
                self.monitor.log(self.step, self.evaluate())
            while self.step < self.args.steps:
                self.step += 1
                self.monitor.log(self.step, self._iteration())
                if self.args.eval_every and self.step % self.args.eval_every == 0:
                    self.monitor.log(self.step, self.evaluate())
                if self.args.save_every and self.step % self.args.save_every == 0:
                    self._checkpoints.save(self)
            self._draw_memory()
        if self.args.save_path:
            self._export(Path(self.args.save_path))
        self.on_train_end()

    def _iteration(self) -> dict[str, float]:
        self._seconds, self.report = {}, None
        began = time.monotonic()
        self.on_step_begin()
        self.on_sample_begin()
        with self._timed("generate"):
            rollouts = self.maker.generate(
                next(self.prompts),
                seed=self._seed(),
                temperature=self.args.temperature,
                samples=self.args.n_samples_per_prompt,
            )
        self.on_sample_end()
        with self._timed("score"):
            experience, numbers = self.maker.make(rollouts)
        for one in experience:
            self.buffer.append(one)
        numbers["kl_coef"] = self.kl.value
        with self._timed("train"):
            numbers |= self._train()
        self.kl.update(numbers["kl"], self.args.rollout_batch_size * self.args.n_samples_per_prompt)
        with self._timed("sync"):
            self.on_step_end()
        whole = time.monotonic() - began
        self._report(rollouts)
        if self.report is not None:
            self._seconds["transfer"] = self.report.seconds
        seconds = {f"seconds_{name}": spent for name, spent in self._seconds.items()}
        return {**numbers, **seconds, "seconds": whole, "sync_share": self._seconds["sync"] / whole}

    def _export(self, folder: Path) -> None:
        export(self.args, self.strategy, self.maker.tokenizer, folder)
        if self.average is not None:
            with self.average.swapped():
                export(self.args, self.strategy, self.maker.tokenizer, folder / "ema")

    def _report(self, rollouts: Sequence[Rollout]) -> None:
        self.monitor.memory(self.strategy.report_memory(f"step {self.step}"))
        if self.args.plot_every and self.step % self.args.plot_every == 0:
            everybody = self.strategy.all_gather([len(one.response_ids) for one in rollouts])
            self.monitor.lengths(self.step, [one for some in everybody for one in some], self.args.generate_max_len)
            self._draw_memory()

    def _draw_memory(self) -> None:
        if self.args.plot_every and self.strategy.memory is not None:
            self.monitor.ledger(self.strategy.memory.ledger)

    def _train(self) -> dict[str, float]:
        """All epochs over the buffer. Returns means over steps and sums over ranks."""
        for role in self.strategy.trained:
            self.strategy.maybe_load_optimizer(role.optimizer)
        steps: list[dict[str, float]] = []
        rows = self.args.train_batch_size // self.strategy.dp_size
        for epoch in range(self.args.max_epochs):
            order = self.strategy.shared([self._seed() + epoch])[0]
            for micro_batches in self.buffer.steps(order, rows, self.args.micro_train_batch_size):
                steps.append(update(self.args, self.strategy, micro_batches, self.kl.value))
                if self.average is not None:
                    self.average.update()
        self.buffer.clear()
        for role in self.strategy.trained:
            self.strategy.maybe_offload_optimizer(role.optimizer)
        means = {name: sum(one[name] for one in steps) / len(steps) for name in steps[0]}
        reduced: dict[str, float] = self.strategy.all_reduce(means)
        return reduced

    def evaluate(self) -> dict[str, float]:
        """Greedy answers to all evaluation prompts, the same chain as in training: `eval_` numbers over all ranks.

        Changes nothing: neither weights, optimizers, buffer, KL coefficient, data position nor random states.
        """
        self.on_validate_begin()
        states = random_states()  # what judges may draw from any
        mine = [
            self.evaluation[index]
            for index in range(self.strategy.rank, len(self.evaluation), self.strategy.world_size)
        ]
        rollouts = self.maker.generate(mine, seed=self.args.seed, temperature=0.0, samples=1)
        _, numbers = self.maker.make(rollouts, grouped=False)
        set_random_states(states)
        self.on_validate_end()
        return {f"eval_{name}": numbers[name] for name in ("reward", "kl", "response_length")}

    def _seed(self) -> int:
        """Of this iteration on this rank: the same after a resume, another on every rank."""
        share = self.args.rollout_batch_size * self.args.n_samples_per_prompt // self.strategy.world_size
        return (self.args.seed + self.step) * SEED_STRIDE + self.strategy.rank * share

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - began

    def state_dict(self) -> dict[str, Any]:
        """What this rank knows beside models and optimizers."""
        return {
            "step": self.step,
            "prompts": self.prompts.state_dict(),
            "buffer": self.buffer.state_dict(),
            "kl": self.kl.value,
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The other way round."""
        self.step, self.kl.value = state["step"], state["kl"]
        self.prompts.load_state_dict(state["prompts"])
        self.buffer.load_state_dict(state["buffer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
