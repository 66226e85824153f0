"""What does not depend on who shards the models: groups, numbers over ranks, the engine and the phases of memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import wsync
from integrations.ppo import conflicts
from integrations.ppo.arguments import Arguments
from integrations.ppo.engines import start_engine
from integrations.ppo.engines.base import Completion, InferenceEngine, SamplingParams
from integrations.ppo.errors import ConflictError
from integrations.ppo.groups import EngineGroup
from integrations.ppo.log_probs import Scoring
from integrations.ppo.sequence_parallel import SequenceParallel
from integrations.ppo.strategy.master_weights import to_bfloat16
from integrations.ppo.strategy.phases import phases
from integrations.ppo.strategy.roles import Role
from integrations.ppo.strategy.sharding import copies, shard
from wsync.memory.cuda_device import CudaDevice

T = TypeVar("T")
Phase = Literal["rollout", "sync", "score", "train"]


class EngineStatus(IntEnum):
    """Whether the engine could generate now."""

    SLEEPED = 0
    WAKEUP = 1


class Strategy(ABC):
    """How models are sharded and stepped, and the one engine that they share their devices with.

    Nothing here knows what a reward or an advantage is. Methods that are marked *collective* are called by every rank,
    in the same order.
    """

    def __init__(self, args: Arguments) -> None:
        """The default process group is there. Raises `ConflictError` if `args` do not fit the number of ranks."""
        conflicts.check_world(args, dist.get_world_size())
        self.args = args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU
        self.roles: dict[str, Role] = {}
        self.dp_size = self.world_size // args.sp_size
        self.sequence_parallel = SequenceParallel(args.sp_size) if args.sp_size > 1 else None
        self._engine_group = EngineGroup(args.engine_tp_size)
        self.inference_engine: InferenceEngine | None = None
        self.memory: wsync.MemoryManager | None = None
        self._guests = ExitStack()
        self._copies = copies(self.world_size, args.initial_model_shard_size, self.device)

    # Models.

    def prepare_model(self, model: Any) -> Any:
        """*Collective.* Shard `model`, all of which every rank has, by FSDP2.

        With `--initial_model_shard_size` so many neighbouring ranks share a copy.
        """
        return shard(model, self.device, bf16=self.args.bf16, mesh=self._copies)

    @abstractmethod
    def prepare(self, name: str, model: Any, learning_rate: float) -> Role:
        """*Collective.* Shard a model and give it an optimizer and a scheduler."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, role: Role) -> None:
        """*Collective.* Add the gradients of `loss`, averaged over ranks."""

    @abstractmethod
    def optimizer_step(self, role: Role) -> float:
        """*Collective.* Clip this model's gradients, and this model's alone, step and zero them. Returns their norm."""

    @abstractmethod
    def save_ckpt(self, folder: Path) -> None:
        """*Collective.* Write weights, optimizers and schedulers of all roles that train."""

    @abstractmethod
    def load_ckpt(self, folder: Path) -> None:
        """*Collective.* The other way round."""

    def freeze(self, name: str, model: Any) -> Role:
        """*Collective.* Shard a model that is not trained. It is on the device within `loaded` alone.

        What computes in bfloat16 and never changes is kept in it: the numbers are the same.
        """
        if self.args.bf16:
            to_bfloat16(model)
        self.roles[name] = Role(name=name, model=self.prepare_model(model.requires_grad_(False).eval()))
        return self.roles[name]

    @property
    def scoring(self) -> Scoring:
        """How log-probabilities and values are computed."""
        return Scoring(
            temperature=self.args.temperature,
            packing=self.args.packing_samples,
            chunk_size=self.args.chunk_size if self.args.fused_linear_logprob else None,
            sequence_parallel=self.sequence_parallel,
        )

    def shared(self, items: list[T]) -> list[T]:
        """*Collective.* The items of all ranks that share their sequences with this one; without such, its own."""
        return self.sequence_parallel.everybody(items) if self.sequence_parallel is not None else items

    @property
    def trained(self) -> list[Role]:
        """The roles that have an optimizer, the actor first."""
        return [role for role in self.roles.values() if role.optimizer is not None]

    # Numbers over ranks.

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def print(self, *words: object) -> None:
        """Print on rank 0."""
        if self.is_rank_0:
            print(*words, flush=True)

    def all_reduce(
        self, numbers: Mapping[str, float] | torch.Tensor, op: Literal["mean", "sum", "max"] = "mean"
    ) -> Any:
        """*Collective.* A tensor, or numbers by name, over all ranks: the same type as was given."""
        if isinstance(numbers, Mapping):
            reduced = self.all_reduce(
                torch.tensor([numbers[name] for name in sorted(numbers)], dtype=torch.float64), op
            )
            return dict(zip(sorted(numbers), reduced.tolist(), strict=True))
        result = numbers.detach().clone().to(self.device)
        dist.all_reduce(result, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return result / self.world_size if op == "mean" else result

    def all_gather(self, item: T) -> list[T]:
        """*Collective.* What each rank passed, in their order."""
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def evened(self, batches: Sequence[T], filler: T) -> list[T]:
        """*Collective.* `batches`, and as many fillers after them as the rank with the most has more.

        A forward of a sharded model is collective: all ranks make the same number of them.
        """
        rounds = int(self.all_reduce(torch.tensor(len(batches)), "max"))
        return [*batches, *[filler] * (rounds - len(batches))]

    def setup_dataloader(self, dataset: "Dataset[T]", batch_size: int, *, shuffle: bool) -> "DataLoader[T]":
        """Each rank's part of `dataset`, in lists of `batch_size`. What fills no batch on every rank is left out."""
        sampler: DistributedSampler[T] = DistributedSampler(
            dataset, self.world_size, self.rank, shuffle=shuffle, seed=self.args.seed, drop_last=True
        )
        return DataLoader(dataset, batch_size, sampler=sampler, drop_last=True, collate_fn=list)

    # The engine, and who is on the device.

    def setup_inference_engine(self, args: Arguments, actor: Role, checkpoint: Path) -> InferenceEngine:
        """*Collective.* Start the engine on `checkpoint`, sync it with the actor, and let it sleep.

        All roles are there by now: from here on one `wsync.MemoryManager` says what is on the device. The sync comes
        before it moves anything: once the engine has slept at level 2, nothing is left to verify the load plan with.
        """
        self.inference_engine = start_engine(args, checkpoint, self.device, self._engine_group)
        moved = [] if args.fsdp_cpu_offload else self.trained  # else FSDP2 moves them
        models = {role.name: role.model for role in moved}
        optimizers = {f"{role.name} optimizer": role.optimizer for role in moved}
        self.memory = wsync.MemoryManager(
            engine=self.inference_engine.handle,
            models=models,
            optimizers=optimizers,
            frozen={role.name: role.model for role in self.roles.values() if role.optimizer is None},
            phases=phases(args, list(models), list(optimizers), engine=self.inference_engine.handle is not None),
            sleep_level=args.engine_sleep_level,
            timeout_s=args.timeout_s,  # one engine's answers may take that much longer than another's
            device=None if self.device.type == "cpu" else CudaDevice(self.device),
        )
        wsync.sync(actor.model, self.inference_engine.handle)
        self.maybe_sleep_inference_engine()
        return self.inference_engine

    def update_engine_weights(self, actor: Role) -> wsync.SyncReport | None:
        """*Collective.* Bring the engine to the actor's weights, and leave it awake. None, and a line, without one."""
        if self.inference_engine is None:
            self.print("there is no inference engine to update")
            return None
        return wsync.sync(actor.model, self.inference_engine.handle, memory=self.memory)

    @property
    def inference_engine_status(self) -> EngineStatus:
        """Asleep unless weights and KV cache are there."""
        awake = self.memory is not None and self.memory.phase == "rollout"
        return EngineStatus.WAKEUP if awake or self.args.disable_engine_sleep else EngineStatus.SLEEPED

    @property
    def wakes_by_sync(self) -> bool:
        """Whether the engine drops its weights to sleep, so that waking it is a sync."""
        return self.args.engine_sleep_level == 2

    def wakeup_inference_engine(self) -> None:
        """*Collective.* Let the engine serve the weights that it fell asleep with. Does nothing if it is awake.

        With `--engine_sleep_level 2` it has none, and gets the actor's present ones.
        """
        if self.wakes_by_sync and self.inference_engine_status is EngineStatus.SLEEPED:
            self.update_engine_weights(self.roles["actor"])
        else:
            self.enter("rollout")

    def maybe_sleep_inference_engine(self) -> None:
        """*Collective.* Make room for scoring: the engine sleeps, unless that is disabled."""
        self.enter("score")

    def maybe_load_optimizer(self) -> None:
        """*Collective.* Make room for training: with `--adam_offload` optimizer states come back."""
        self.enter("train")

    def maybe_offload_optimizer(self) -> None:
        """*Collective.* With `--adam_offload` optimizer states leave. Does nothing if they are away."""
        self.enter("score")

    def enter(self, phase: Phase) -> None:
        """*Collective.* See `wsync.MemoryManager.enter`; `RankError` names the ranks that are elsewhere."""
        if self.memory is not None:
            self.memory.enter(phase)

    @contextmanager
    def loaded(self, role: Role) -> Iterator[None]:
        """*Collective.* Have a frozen model on the device for a block, one at a time.

        Raises `ConflictError` for one that FSDP2 moves by itself.
        """
        if self.args.fsdp_cpu_offload and role.optimizer is not None:
            raise ConflictError(f"FSDP2 moves {role.name} by itself, layer by layer: --fsdp_cpu_offload")
        if self.memory is None:
            yield
            return
        with self.memory.using(role.name):
            yield

    def reload_model(self, role: Role) -> None:
        """*Collective.* As `loaded`, until `offload_model`. Raises `MemoryStateError` while another one is there."""
        self._guests.enter_context(self.loaded(role))

    def offload_model(self) -> None:
        """*Collective.* Let what `reload_model` brought go."""
        self._guests.close()

    def report_memory(self, prefix: str) -> str:
        """One line about what is on the device."""
        return self.memory.report_memory(prefix) if self.memory is not None else f"{prefix}: no engine yet"

    def gather_and_generate(
        self,
        sampling_params: SamplingParams,
        all_prompt_token_ids: Sequence[Sequence[int]],
        sleep_engine: bool = True,
    ) -> list[Completion]:
        """*Collective.* An answer to each prompt of this rank, in their order; ranks may have different numbers.

        Wakes the engine if it sleeps, and lets it sleep afterwards if `sleep_engine`.
        """
        if self.inference_engine is None:
            raise ConflictError("setup_inference_engine comes before gather_and_generate")
        self.wakeup_inference_engine()
        asked = [(prompt, sampling_params.seed + index) for index, prompt in enumerate(all_prompt_token_ids)]
        everybody, mine = self._engine_group.gather(asked)
        prompts, seeds = [prompt for prompt, _ in everybody], [seed for _, seed in everybody]
        answers = self.inference_engine.generate(prompts, seeds, sampling_params)[mine] if everybody else []
        if sleep_engine:
            self.maybe_sleep_inference_engine()
        return answers


_CPU = torch.device("cpu")
