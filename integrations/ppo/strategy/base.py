"""What does not depend on who shards the models: the engine and the phases of memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

import wsync
from integrations.ppo.arguments import Arguments
from integrations.ppo.engines import start_engine
from integrations.ppo.engines.base import Completion, InferenceEngine, SamplingParams
from integrations.ppo.errors import ConflictError
from integrations.ppo.groups import EngineGroup
from integrations.ppo.log_probs import Scoring
from integrations.ppo.sequence_parallel import SequenceParallel
from integrations.ppo.strategy.master_weights import to_bfloat16
from integrations.ppo.strategy.phases import phases
from integrations.ppo.strategy.ranks import Ranks
from integrations.ppo.strategy.roles import Role, role_of
from integrations.ppo.strategy.sharding import copies, shard
from integrations.ppo.texts import encode, tokenizer
from wsync.memory.cuda_device import CudaDevice

T = TypeVar("T")
Phase = Literal["rollout", "sync", "score", "train"]


class EngineStatus(IntEnum):
    """Whether the engine could generate now."""

    SLEEPED = 0
    WAKEUP = 1


class Strategy(Ranks, ABC):
    """How models are sharded and stepped, and the one engine that they share their devices with.

    Nothing here knows what a reward or an advantage is. Models, optimizers and schedulers are passed as they are; a
    `Role` is what holds them together.
    """

    def __init__(self, args: Arguments) -> None:
        """See `Ranks`."""
        super().__init__(args)
        self.roles: dict[str, Role] = {}
        self.dp_size = self.world_size // args.sp_size
        self.micro_batches = args.train_batch_size // (args.micro_train_batch_size * self.dp_size)
        """Of each rank in an optimizer step."""
        self.sequence_parallel = SequenceParallel(args.sp_size) if args.sp_size > 1 else None
        self._engine_group = EngineGroup(args.engine_tp_size)
        self.inference_engine: InferenceEngine | None = None
        self.memory: wsync.MemoryManager | None = None
        self._actor: Any = None
        self._guests: dict[str, ExitStack] = {}
        self._meshes: dict[int, DeviceMesh | None] = {}

    # Models.

    def prepare_model(self, model: Any, is_training: bool = False, shard_size: int = -1) -> Any:
        """*Collective.* Shard a model by FSDP2.

        Args:
            model: all of it, on every rank.
            is_training: with `--fsdp_cpu_offload` what trains stays in host memory.
            shard_size: so many neighbouring ranks share a copy. -1: all of them, or for a model that is not trained as
                many as `--initial_model_shard_size` says.

        Raises `ConflictError` if that is no divisor of the number of ranks.
        """
        size = shard_size
        if size == -1:
            size = 0 if is_training else self.args.initial_model_shard_size
        if size not in self._meshes:
            self._meshes[size] = copies(self.world_size, size, self.device)
        return shard(
            model.train(is_training),
            self.device,
            bf16=self.args.bf16,
            mesh=self._meshes[size],
            cpu_offload=is_training and self.args.fsdp_cpu_offload,
        )

    @abstractmethod
    def prepare(self, name: str, model: Any, learning_rate: float) -> Role:
        """*Collective.* Shard a model and give it an optimizer and a scheduler."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any) -> None:
        """*Collective.* Add the gradients of `loss`, averaged over ranks. `optimizer_step` comes after each one."""

    @abstractmethod
    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str = "model") -> float | None:
        """*Collective.* Count a micro-batch of this optimizer's model; the last one of a step makes that step.

        `name` is a label, as trainers written for others pass it. It clips this model's gradients, and this model's
        alone, steps and zeroes them. Returns their norm, else None.
        """

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
        return self._add(Role(name=name, model=self.prepare_model(model.requires_grad_(False))))

    def _add(self, role: Role) -> Role:
        if self.memory is not None:
            raise ConflictError(f"{role.name} comes too late: setup_inference_engine said who shares the device")
        self.roles[role.name] = role
        return role

    @cached_property
    def tokenizer(self) -> Any:
        """Of the actor's checkpoint."""
        return tokenizer(self.args)

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

    # The engine, and who is on the device.

    def setup_inference_engine(
        self,
        args: Arguments,
        engine_type: Literal["vllm", "sglang", "hf"] = "vllm",
        actor: Any = None,
        checkpoint: Path | None = None,
    ) -> InferenceEngine:
        """*Collective.* Start the engine, sync it with the actor, and let it sleep.

        All roles are there by now: from here on one `wsync.MemoryManager` says what is on the device. The sync comes
        before it moves anything: once the engine has slept at level 2, nothing is left to verify the load plan with.

        Args:
            args: those of this strategy.
            engine_type: of the engine, whatever `args` say.
            actor: its model; None: the engine has the weights of the checkpoint until `update_engine_weights`.
            checkpoint: folder that the engine starts from; default: `--pretrain`.

        Raises `ConflictError` if it has nothing to start from, or could not wake without an actor.
        """
        if checkpoint is None and not args.pretrain:
            raise ConflictError("an engine starts from a checkpoint: pass one, or --pretrain")
        if actor is None and self.wakes_by_sync:
            raise ConflictError(
                "--engine_sleep_level 2 drops the engine's weights, and waking is a sync: pass the actor"
            )
        self._actor = actor
        self.inference_engine = start_engine(
            replace(args, engine_type=engine_type), checkpoint or Path(args.pretrain), self.device, self._engine_group
        )
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
        if actor is not None:
            wsync.sync(actor, self.inference_engine.handle, config=args.sync_config)
        self.maybe_sleep_inference_engine()
        return self.inference_engine

    def update_engine_weights(self, actor: Any) -> wsync.SyncReport | None:
        """*Collective.* Bring the engine to the actor's weights, and leave it awake. None, and a line, without one."""
        if self.inference_engine is None:
            self.print("there is no inference engine to update")
            return None
        return wsync.sync(actor, self.inference_engine.handle, config=self.args.sync_config, memory=self.memory)

    @property
    def inference_engine_status(self) -> EngineStatus:
        """Asleep unless weights and KV cache are there."""
        awake = self.memory is not None and (self.memory.phase == "rollout" or self.args.disable_engine_sleep)
        return EngineStatus.WAKEUP if awake else EngineStatus.SLEEPED

    @property
    def wakes_by_sync(self) -> bool:
        """Whether the engine drops its weights to sleep, so that waking it is a sync."""
        return self.args.engine_sleep_level == 2

    def wakeup_inference_engine(self) -> None:
        """*Collective.* Let the engine serve the weights that it fell asleep with. Does nothing if it is awake.

        With `--engine_sleep_level 2` it has none, and gets the actor's present ones.
        """
        if self.wakes_by_sync and self.inference_engine_status is EngineStatus.SLEEPED:
            self.update_engine_weights(self._actor)
        else:
            self.enter("rollout")

    def maybe_sleep_inference_engine(self) -> None:
        """*Collective.* Make room for scoring: the engine sleeps, unless that is disabled."""
        self.enter("score")

    def maybe_load_optimizer(self, optimizer: Any, device: torch.device | None = None) -> None:
        """*Collective.* Make room for training: with `--adam_offload` an optimizer's states come back.

        So do those of all others, since one phase of memory has them all. Does nothing if they are there.

        Raises `ConflictError` for an optimizer that was not prepared here, and for another device than that of the
        weights, which is the default.
        """
        role = role_of(self.roles, optimizer)
        if device is not None and torch.device(device) != self.device:
            raise ConflictError(f"{role.name}'s optimizer steps weights on {self.device}, not on {device}")
        self.enter("train")

    def maybe_offload_optimizer(self, optimizer: Any) -> None:
        """*Collective.* The other way round, for all of them. Does nothing if they are away."""
        role_of(self.roles, optimizer)
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

    def reload_model(self, models: Any) -> None:
        """*Collective.* As `loaded`, until `offload_model`, for a model or a list of them. What is there stays there.

        Raises `MemoryStateError` for a second one that is not: peaks are those of one.
        """
        for model in models if isinstance(models, list | tuple) else [models]:
            role = role_of(self.roles, model)
            if self.memory is None or role.name not in self.memory.present:
                guest = ExitStack()
                guest.enter_context(self.loaded(role))
                self._guests[role.name] = guest

    def offload_model(self, models: Any) -> None:
        """*Collective.* Let go what `reload_model` brought of these. What trains comes and goes with phases."""
        for model in models if isinstance(models, list | tuple) else [models]:
            guest = self._guests.pop(role_of(self.roles, model).name, None)
            if guest is not None:
                guest.close()

    def report_memory(self, prefix: str) -> str:
        """One line about what is on the device."""
        return self.memory.report_memory(prefix) if self.memory is not None else f"{prefix}: no engine yet"

    def gather_and_generate(
        self,
        sampling_params: SamplingParams,
        all_prompt_token_ids: Sequence[Sequence[int]] | None = None,
        all_prompts: Sequence[str] | None = None,
        *,
        sleep_engine: bool = True,
    ) -> list[Completion]:
        """*Collective.* An answer to each prompt of this rank, in their order; ranks may have different numbers.

        Wakes the engine if it sleeps.

        Args:
            sampling_params: how.
            all_prompt_token_ids: the prompts,
            all_prompts: or their texts, of which the last `--prompt_max_len` tokens are taken.
            sleep_engine: whether the engine sleeps afterwards.

        Raises `ConflictError` without an engine, and unless prompts are given in one of both ways.
        """
        if self.inference_engine is None:
            raise ConflictError("setup_inference_engine comes before gather_and_generate")
        if (all_prompt_token_ids is None) == (all_prompts is None):
            raise ConflictError("gather_and_generate takes all_prompt_token_ids or all_prompts: pass one of them")
        longest = self.args.prompt_max_len
        mine_ids = all_prompt_token_ids or [encode(self.tokenizer, text, longest) for text in all_prompts or ()]
        self.wakeup_inference_engine()
        asked = [(prompt, sampling_params.seed + index) for index, prompt in enumerate(mine_ids)]
        everybody, mine = self._engine_group.gather(asked)
        prompts, seeds = [prompt for prompt, _ in everybody], [seed for _, seed in everybody]
        answers = self.inference_engine.generate(prompts, seeds, sampling_params)[mine] if everybody else []
        if sleep_engine:
            self.maybe_sleep_inference_engine()
        return answers
