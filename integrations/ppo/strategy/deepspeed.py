"""Models in DeepSpeed engines of ZeRO stage 1, 2 or 3, with its checkpoints. Frozen models are sharded by FSDP2."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from integrations.ppo.arguments import Arguments
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
        self._accumulated: dict[str, int] = {}
        self._micro_batches = args.train_batch_size // (args.micro_train_batch_size * self.dp_size)

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
        self.roles[name] = Role(name=name, model=engine, optimizer=engine, scheduler=engine.lr_scheduler)
        self._accumulated[name] = 0
        return self.roles[name]

    def backward(self, loss: torch.Tensor, role: Role) -> None:
        """See `Strategy`. DeepSpeed counts micro-batches by calls of `step`, of which the last one is a step."""
        if self._accumulated[role.name]:
            role.model.step()
        role.model.backward(loss, scale_wrt_gas=False)
        self._accumulated[role.name] += 1

    def optimizer_step(self, role: Role) -> float:
        """See `Strategy`. Raises `RuntimeError` unless all micro-batches of a step came before."""
        if self._accumulated[role.name] != self._micro_batches:
            raise RuntimeError(
                f"{role.name} has gradients of {self._accumulated[role.name]} micro-batches; "
                f"a step has {self._micro_batches}"
            )
        role.model.step()
        self._accumulated[role.name] = 0
        return float(role.model.get_global_grad_norm())

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
            "gradient_accumulation_steps": self._micro_batches,
            "gradient_clipping": self.args.max_norm,
            "zero_optimization": {"stage": self.args.zero_stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": self.args.bf16},
        }
