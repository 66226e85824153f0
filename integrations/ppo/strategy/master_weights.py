"""AdamW for bfloat16 weights: what a step changes are float32 ones, which are a part of its state."""

from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

MASTER = "master"
"""Name of a float32 weight in the state."""


def to_bfloat16(model: nn.Module) -> nn.Module:
    """Have `model`'s parameters in bfloat16; buffers keep their dtypes, as under FSDP2's mixed precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


class MasterAdamW(torch.optim.AdamW):
    """As if AdamW stepped float32 weights, which are rounded afterwards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See `torch.optim.Optimizer`; there is no closure."""
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            states = [self._state(one) for one in trained]
            masters = [state[MASTER] for state in states]
            adamw(
                masters,
                [one.grad.float() for one in trained],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for one, master in zip(trained, masters, strict=True):
                one.copy_(master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`, which would round each state to the dtype of its parameter."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [one for group in self.param_groups for one in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name != "step":
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            master = parameter.detach().float()
            state |= {
                "step": torch.zeros(()),
                MASTER: master,
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        return state
