"""A small engine model whose loader fuses, slices and pads as the real ones do, and others that misbehave."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from wsync.plan import TensorSpec
from wsync.topology import Endpoint, local_endpoint

HIDDEN, HEADS_OUT, KV_OUT, INTER, VOCAB, PADDED = 12, 8, 4, 20, 11, 16


def checkpoint(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random full tensors under their checkpoint names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (VOCAB, HIDDEN),
        "attn.q.weight": (HEADS_OUT, HIDDEN),
        "attn.k.weight": (KV_OUT, HIDDEN),
        "attn.v.weight": (KV_OUT, HIDDEN),
        "attn.o.weight": (HIDDEN, HEADS_OUT),
        "mlp.gate.weight": (INTER, HIDDEN),
        "mlp.up.weight": (INTER, HIDDEN),
        "mlp.down.weight": (HIDDEN, INTER),
        "norm.weight": (HIDDEN,),
        "scale": (),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def specs_of(weights: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name=name, shape=tuple(t.shape), dtype=t.dtype) for name, t in weights.items()]


class Fused(torch.nn.Module):
    """The live parameters of one TP rank."""

    def __init__(self, tp: int, dtype: torch.dtype) -> None:
        super().__init__()

        def live(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)

        self.embed = live(PADDED // tp, HIDDEN)
        self.qkv = live((HEADS_OUT + 2 * KV_OUT) // tp, HIDDEN)
        self.o = live(HIDDEN, HEADS_OUT // tp)
        self.gate_up = live(2 * INTER // tp, HIDDEN)
        self.down = live(HIDDEN, INTER // tp)
        self.norm = live(HIDDEN)
        self.scale = live()
        self.register_buffer("cache", torch.randn(5), persistent=False)


Place = Callable[[torch.Tensor], None]


class ToyLoader:
    """Meets `wsync.protocols.Loader`."""

    engine = "toy 1.0"
    whole = True

    def __init__(self, rank: int = 0, tp: int = 1, dtype: torch.dtype = torch.float32) -> None:
        self.model = Fused(tp, dtype)
        self.rank, self.tp = rank, tp
        self.launched: dict[str, torch.Tensor] | None = None
        self.calls: list[str] = []

    def endpoint(self) -> Endpoint:
        return local_endpoint("cpu")

    def targets(self) -> Mapping[str, torch.Tensor]:
        return {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}

    def required(self) -> Sequence[str]:
        return [name for name, _ in self.model.named_parameters(remove_duplicate=False)]

    def accepts(self, name: str) -> bool:
        return False

    def launch_weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        return None if self.launched is None else list(self.launched.items())

    def begin(self) -> None:
        self.calls.append("begin")

    def finish(self) -> None:
        self.calls.append("finish")

    def rollback(self) -> None:
        self.calls.append("rollback")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.places()[name](weight)

    def places(self) -> dict[str, Place]:
        """What each checkpoint name does."""
        model = self.model
        q, kv, inter = HEADS_OUT // self.tp, KV_OUT // self.tp, INTER // self.tp
        return {
            "embed.weight": self.embed,
            "attn.q.weight": lambda w: self.rows(model.qkv, 0, q, w),
            "attn.k.weight": lambda w: self.rows(model.qkv, q, kv, w),
            "attn.v.weight": lambda w: self.rows(model.qkv, q + kv, kv, w),
            "attn.o.weight": lambda w: self.columns(model.o, w),
            "mlp.gate.weight": lambda w: self.rows(model.gate_up, 0, inter, w),
            "mlp.up.weight": lambda w: self.rows(model.gate_up, inter, inter, w),
            "mlp.down.weight": lambda w: self.columns(model.down, w),
            "norm.weight": lambda w: self.direct(model.norm, w),
            "scale": lambda w: self.direct(model.scale, w),
        }

    def direct(self, param: torch.Tensor, weight: torch.Tensor) -> None:
        assert param.shape == weight.shape, f"Tried to load weights of size {weight.shape} to {param.shape}"
        param.data.copy_(weight)

    def rows(self, param: torch.Tensor, start: int, count: int, weight: torch.Tensor) -> None:
        part = param.data.narrow(0, start, count)
        shard = weight.narrow(0, self.rank * count, count)
        assert part.shape == shard.shape, f"{part.shape} != {shard.shape}"
        part.copy_(shard)

    def columns(self, param: torch.Tensor, weight: torch.Tensor) -> None:
        """Takes its columns and does not ask how many there are, as real row-parallel loaders do."""
        param.data.copy_(weight.narrow(1, self.rank * param.shape[1], param.shape[1]))

    def embed(self, weight: torch.Tensor) -> None:
        param = self.model.embed
        shard = weight[self.rank * param.shape[0] : (self.rank + 1) * param.shape[0]]
        param.data[: shard.shape[0]].copy_(shard)
        param.data[shard.shape[0] :].fill_(0)
