"""Models in DeepSpeed engines of ZeRO stage 1, 2 or 3, with its checkpoints. Frozen models are sharded by FSDP2."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from integrations.ppo.arguments import Arguments
from integrations.ppo.errors import ConflictError
from integrations.ppo.strategy.base import Strategy
from integrations.ppo.strategy.optimizers import adamw, scheduler
from integrations.ppo.strategy.roles import Role


class DeepspeedStrategy(Strategy):
    """See `Strategy`. A role's model and its optimizer are both the engine."""

    def __init__(self, args: Arguments) -> None:
        """See `Strategy`."""
        super().__init__(args)
        self._deepspeed: Any = import_module("deepspeed")
        if self.device.type == "cpu":  # else a C++ extension is compiled, which gloo does not need
            self._deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def prepare_model(self, model: Any, is_training: bool = False, shard_size: int = -1) -> Any:
        """See `Strategy`. Raises `ConflictError` for what trains: DeepSpeed shards it together with its optimizer."""
        if is_training:
            raise ConflictError("DeepSpeed shards a model that trains together with its optimizer: call prepare")
        return super().prepare_model(model, is_training, shard_size)

    def prepare(self, name: str, model: Any, learning_rate: float) -> Role:
        """See `Strategy`."""
        optimizer = adamw(self.args, model.train(), learning_rate)
        engine, *_ = self._deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler(self.args, optimizer),
            config=self._config(),
            dist_init_required=False,
        )
        return self._add(Role(name=name, model=engine, optimizer=engine, scheduler=engine.lr_scheduler))

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any) -> None:
        """See `Strategy`."""
        model.backward(loss, scale_wrt_gas=False)

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str = "model") -> float | None:
        """See `Strategy`. DeepSpeed itself counts micro-batches and steps the scheduler."""
        last = model.is_gradient_accumulation_boundary()
        model.step()
        return float(model.get_global_grad_norm()) if last else None

    def save_ckpt(self, folder: Path) -> None:
        """See `Strategy`."""
        for role in self.trained:
            role.model.save_checkpoint(str(folder), tag=role.name, save_latest=False)

    def load_ckpt(self, folder: Path) -> None:
        """See `Strategy`."""
        for role in self.trained:
            role.model.load_checkpoint(str(folder), tag=role.name)

    def _config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.args.micro_train_batch_size,  # DeepSpeed knows nothing of --sp_size
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": self.args.max_norm,
            "zero_optimization": {"stage": self.args.zero_stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self.args.bf16},
        }
