"""Engine worlds and trainer worlds for tests: processes that know of each other nothing but an address and a secret."""

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import wsync
from wsync.adapters.engines.hf import HFEngine

SECRET = "a secret of the two worlds in this test"
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
BUCKET_BYTES = 32 << 10


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def sharded(seed: int) -> LlamaForCausalLM:
    """FSDP2 over the default group."""
    model = llama(seed)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def optimizer_step(model: nn.Module) -> None:
    """One real step on every rank: the trainer's own collectives run, and every weight moves."""
    tokens = torch.randint(1, 256, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    model.zero_grad()


def bytes_of_weights(model: nn.Module) -> dict[str, bytes]:
    """*Collective if sharded.* Every parameter, bit by bit."""
    tensors = {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def tokens_of(weights: dict[str, bytes]) -> list[list[int]]:
    """What a model with these weights generates, by transformers alone."""
    model = llama(0)
    for name, parameter in model.named_parameters():
        parameter.data = torch.frombuffer(bytearray(weights[name]), dtype=parameter.dtype).view(parameter.shape)
    with torch.no_grad():
        return HFEngine(model).generate(PROMPTS, max_new_tokens=8)


def serve_llama(pipe: Connection, seed: int, address: str = "127.0.0.1:0") -> None:
    """Body of an engine process: serves one model and answers the test, until the test hangs up.

    Says ("address", address) first, then for "look" ("state", (version or error, weights, tokens or error)).
    """
    model = llama(seed)
    with wsync.serve(model, address, secret=SECRET) as served:
        pipe.send(("address", served.address))
        while pipe.recv() == "look":
            pipe.send(
                ("state", (_said(HFEngine(model).version), bytes_of_weights(model), _said(lambda: _tokens(model))))
            )


def _tokens(model: nn.Module) -> list[list[int]]:
    return HFEngine(model).generate(PROMPTS, max_new_tokens=8)


def _said(call: Any) -> Any:
    try:
        return call()
    except wsync.WsyncError as error:
        return f"{type(error).__name__}: {error}"


def remote(addresses: Sequence[str]) -> list[wsync.RemoteEngine]:
    """An engine for each address."""
    return [wsync.RemoteEngine(address, secret=SECRET, timeout_s=30) for address in addresses]


def timed_error(call: Any, died: Any) -> tuple[str, float]:
    """What `call` raises, and how many seconds after `died()`, a moment on the host's monotonic clock."""
    try:
        call()
    except wsync.WsyncError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - died()
    return "no error", 0.0
