"""A small model under every trainer in the table: how it trains, and its full weights by the trainer's own means."""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.e2e.families import VOCABULARY, build

State = dict[str, torch.Tensor]

_RATE = 0.005
_ZERO: Mapping[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}


class Trainer:
    """A module and an optimizer. Every method is collective."""

    def __init__(self, actor: Any, inner: Any, run: Any = None, rate: float = _RATE) -> None:
        """`actor` is what is synced, `inner` the transformers model in it, `run` what is called to train it."""
        self.actor = actor
        self._inner = inner
        self._run = run if run is not None else actor
        self._rate = rate

    def step(self, seed: int) -> None:
        """One optimizer step that moves every weight which trains."""
        loss_of(self._run, seed).backward()
        trained = [parameter for parameter in self._run.parameters() if parameter.requires_grad]
        torch.optim.AdamW(trained, lr=self._rate).step()
        self._run.zero_grad()

    def score(self) -> None:
        """A forward without gradients, as for log-probabilities. Sharded frameworks may leave weights gathered."""
        with torch.no_grad():
            self._run(input_ids=batch(0))

    def full(self) -> State:
        """Every full tensor by transformers' names."""
        for module in self._inner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        state = self._inner.state_dict()
        return {n: t.full_tensor() if isinstance(t, DTensor) else t.detach() for n, t in state.items()}


class FSDP1Trainer(Trainer):
    """FSDP1 gathers by itself."""

    def full(self) -> State:
        """See `Trainer`."""
        with FullyShardedDataParallel.state_dict_type(self.actor, StateDictType.FULL_STATE_DICT):
            state: State = self.actor.state_dict()
        return state


class DeepSpeedTrainer(Trainer):
    """The engine has the optimizer."""

    def step(self, seed: int) -> None:
        """See `Trainer`."""
        self.actor.backward(loss_of(self.actor, seed))
        self.actor.step()

    def full(self) -> State:
        """See `Trainer`."""
        with _zero().GatheredParameters(list(self._inner.parameters())):
            return {name: tensor.detach().clone() for name, tensor in self._inner.state_dict().items()}


class LoRATrainer:
    """Trains adapters by another trainer; full weights are those of PEFT's own merge, done on a copy that is whole."""

    def __init__(self, trainer: Trainer, family: str) -> None:
        self._trainer, self._family = trainer, family
        self.actor = trainer.actor

    def step(self, seed: int) -> None:
        """See `Trainer`."""
        self._trainer.step(seed)

    def score(self) -> None:
        """See `Trainer`."""
        self._trainer.score()

    def full(self) -> State:
        """See `Trainer`."""
        whole = adapted(self._family, 0)
        whole.load_state_dict(self._trainer.full())
        state: State = whole.merge_and_unload().state_dict()
        return state


class CheckpointTrainer:
    """Another program's weights, in a folder that is replaced by each step."""

    def __init__(self, family: str, seed: int, folder: Path) -> None:
        self._family, self._folder = family, folder
        self._model: Any = None
        self.actor = str(folder)
        self.step(seed)

    def step(self, seed: int) -> None:
        """Writes elsewhere, and renames."""
        self._model = build(self._family, seed)
        dist.barrier()
        if dist.get_rank() == 0:
            scratch = self._folder.with_name("scratch")
            self._model.save_pretrained(scratch)
            self._folder.mkdir(exist_ok=True)
            for file in scratch.iterdir():
                os.replace(file, self._folder / file.name)
        dist.barrier()

    def score(self) -> None:
        """Nobody runs this model."""

    def full(self) -> State:
        """See `Trainer`."""
        state: State = self._model.state_dict()
        return state


AnyTrainer = Trainer | LoRATrainer | CheckpointTrainer


def batch(seed: int) -> torch.Tensor:
    """Token ids [2, 24], the same on every rank."""
    return torch.randint(1, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(seed))


def loss_of(run: Any, seed: int) -> Any:
    """A policy gradient with random advantages: it changes what the model says and does not make it dull."""
    tokens = batch(seed)
    said = torch.log_softmax(run(input_ids=tokens).logits[:, :-1], -1)
    advantages = torch.randn(said.shape[:2], generator=torch.Generator().manual_seed(seed))
    return -(said.gather(-1, tokens[:, 1:, None])[..., 0] * advantages).mean()


def adapted(family: str, seed: int) -> Any:
    """LoRA on attention and, where layers are not stacked experts, on the MLP; no factor is zero."""
    from peft import LoraConfig, get_peft_model

    model = build(family, seed)
    torch.manual_seed(seed)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)).eval()


def sharded(model: Any, **options: Any) -> Any:
    """FSDP2: decoder layers, then the rest."""
    for module in _layers(model):
        fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def plain(family: str, seed: int, folder: Path) -> Trainer:
    model = build(family, seed)
    return Trainer(model, model)


def ddp(family: str, seed: int, folder: Path) -> Trainer:
    model = build(family, seed)
    return Trainer(DistributedDataParallel(model), model)


def compiled(family: str, seed: int, folder: Path) -> Trainer:
    model = build(family, seed)
    return Trainer(torch.compile(model, backend="eager"), model, run=model)


def fsdp2(family: str, seed: int, folder: Path) -> Trainer:
    model = sharded(build(family, seed))
    return Trainer(model, model)


def hsdp(family: str, seed: int, folder: Path) -> Trainer:
    """Two copies, if there are several ranks, each in shards over half of them."""
    copies = min(2, dist.get_world_size())
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("copies", "shards"))
    model = sharded(build(family, seed), mesh=mesh)
    return Trainer(model, model)


def tensor_parallel(family: str, seed: int, folder: Path) -> Trainer:
    """`parallelize_module` alone. Norms, embeddings and stacked experts stay whole on every rank."""
    model = build(family, seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel())
    columns |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
    rows = dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
    for layer in _layers(model):
        names = {name for name, _ in layer.named_modules()}
        parallelize_module(layer, mesh, {n: style for n, style in {**columns, **rows}.items() if n in names})
        for name, parameter in layer.named_parameters():
            if name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):  # seen by each rank's heads only
                untyped: Any = parameter
                untyped.register_post_accumulate_grad_hook(lambda norm: dist.all_reduce(norm.grad))
    return Trainer(model, model)


def fsdp1(family: str, seed: int, folder: Path) -> Trainer:
    model = build(family, seed)
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in _layers(model)}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return FSDP1Trainer(wrapped, model)


def zero(stage: int) -> Callable[[str, int, Path], Trainer]:
    """DeepSpeed; stage 3 partitions each parameter as it is made."""

    def make(family: str, seed: int, folder: Path) -> Trainer:
        config = _zero_config(stage)
        model = build(family, seed)
        if stage == 3:
            weights = dict(model.named_parameters())
            with _zero().Init(config_dict_or_path=config):
                model = type(model)(model.config)
            for name, parameter in model.named_parameters():
                with _zero().GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                    parameter.copy_(weights[name])
        return _initialized(model, model, config)

    return make


def lora(family: str, seed: int, folder: Path) -> LoRATrainer:
    model = adapted(family, seed)
    return LoRATrainer(Trainer(model, model, rate=2 * _RATE), family)


def lora_fsdp2(family: str, seed: int, folder: Path) -> LoRATrainer:
    model = sharded(adapted(family, seed))
    return LoRATrainer(Trainer(model, model, rate=2 * _RATE), family)


def lora_zero3(family: str, seed: int, folder: Path) -> LoRATrainer:
    model = adapted(family, seed)
    return LoRATrainer(_initialized(model, model, _zero_config(3), rate=2 * _RATE), family)


def checkpoint(family: str, seed: int, folder: Path) -> CheckpointTrainer:
    return CheckpointTrainer(family, seed, folder / "checkpoint")


TRAINERS: Mapping[str, Callable[[str, int, Path], AnyTrainer]] = {
    "plain": plain,
    "ddp": ddp,
    "compiled": compiled,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tp": tensor_parallel,
    "fsdp1": fsdp1,
    "zero0": zero(0),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "lora": lora,
    "lora-fsdp2": lora_fsdp2,
    "lora-zero3": lora_zero3,
    "checkpoint": checkpoint,
}
"""Makers by name. Each takes a family, a seed and a folder that all ranks share; collective."""


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]


def _zero_config(stage: int) -> dict[str, Any]:
    return {**_ZERO, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40}}


def _initialized(run: Any, inner: Any, config: dict[str, Any], rate: float = _RATE) -> Trainer:
    trained = [parameter for parameter in run.parameters() if parameter.requires_grad]
    engine, *_ = _deepspeed().initialize(model=run, optimizer=torch.optim.AdamW(trained, lr=rate), config=config)
    return DeepSpeedTrainer(engine, inner)


def _deepspeed() -> Any:
    """DeepSpeed, told where it runs and kept from compiling an extension that gloo does not need."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(LOCAL_RANK=rank, RANK=rank, WORLD_SIZE=world_size, DS_ACCELERATOR="cpu")
    deepspeed = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _zero() -> Any:
    return _deepspeed().zero
