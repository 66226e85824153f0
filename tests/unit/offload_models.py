"""Small models whose tensors share memory in every way, a training step, and what tests of offload compare."""

from collections.abc import Callable

import torch
from torch import nn

from wsync.deadline import Deadline
from wsync.plan import as_bytes


def soon() -> Deadline:
    return Deadline.after(30.0)


class Flat(nn.Module):
    """All parameters and a buffer are views into one buffer."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(8 * 8 + 8 + 8)
        self.weight = nn.Parameter(base[:64].view(8, 8))
        self.bias = nn.Parameter(base[64:72])
        self.scale: torch.Tensor
        self.register_buffer("scale", base[72:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight + self.bias) * self.scale


class Tied(nn.Module):
    """Two linear layers with one weight, and an odd layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(8, 8).T)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.relu(self.first(x)))
        return hidden @ self.turned


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))


def large() -> nn.Module:
    """Weights of 2 MiB each, with blocks of host memory of their own, and small biases."""
    return nn.Sequential(nn.Linear(8, 1 << 16), nn.Linear(1 << 16, 8))


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = LlamaConfig(
                vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
            )
            base = LlamaForCausalLM(config)
            self.model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(inputs_embeds=x[None]).logits
            return logits

    return Scored()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "tied": Tied,
    "flat": Flat,
    "large": large,
    "lora": lora,
}


def made(name: str, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same at every call."""
    torch.manual_seed(3)
    model = MODELS[name]().to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.05)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, keep_gradients: bool = False) -> None:
    device = next(model.parameters()).device
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(device)
    model(x).square().mean().backward()
    optimizer.step()
    if not keep_gradients:
        optimizer.zero_grad()


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def copies(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors(model)]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether all are equal bit by bit."""
    return len(some) == len(others) and all(
        torch.equal(as_bytes(one.detach()), as_bytes(other.detach())) for one, other in zip(some, others, strict=True)
    )


def storage_bytes(model: nn.Module) -> int:
    """Bytes of memory under the tensors of `model`, gradients included."""
    found = [*tensors(model), *(p.grad for p in model.parameters() if p.grad is not None)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())
