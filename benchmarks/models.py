"""What is synced: a Llama-shaped model of 2 GiB in fp32, and models of many equal tensors."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def llama(*, seed: int, small: bool) -> LlamaForCausalLM:
    """Random fp32 weights: 537M parameters, 2.0 GiB; 2.6M if `small`. Every weight is different for every seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=2048 if small else 32000,
        hidden_size=256 if small else 2048,
        intermediate_size=704 if small else 5632,
        num_hidden_layers=2 if small else 9,
        num_attention_heads=2 if small else 16,
        num_key_value_heads=1 if small else 4,
        head_dim=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


class Equal(nn.Module):
    """`count` equal fp32 parameters of `nbytes` each, random; passes for a model that generates."""

    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(nbytes // 256, 64)) for _ in range(count))

    def generate(self) -> None:
        """Never called."""


def payload(model: nn.Module) -> list[torch.Tensor]:
    """The parameters, detached, in order."""
    return [parameter.detach() for parameter in model.parameters()]


def nbytes_of(model: nn.Module, dtype: torch.dtype) -> int:
    """All parameters in `dtype`."""
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
