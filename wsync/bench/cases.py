"""What is synced: names and shapes of models that people train, and the same bytes in few tensors and in many."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Shapes = Mapping[str, tuple[int, ...]]

AUTO_BYTES = 256 << 20
"""Without a stated scale a case is made at most that large, in bytes on the wire."""

_TINY = 10_000
_LARGE = 100
_TINY_SIDE = 128
_TINY_NUMEL = _TINY_SIDE**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A list of tensors, at any size."""

    name: str
    about: str
    """For people."""

    build: Callable[[float], Shapes]
    """Factor for every dim -> name and shape of each tensor. The number of tensors does not depend on the factor."""

    def shapes(self, scale: float) -> Shapes:
        """About `scale` times the bytes of the full case, in just as many tensors."""
        return self.build(math.sqrt(scale))

    def auto_scale(self, itemsize: int) -> float:
        """1, or less if the case would be larger than `AUTO_BYTES` in elements of `itemsize` bytes."""
        return min(1.0, AUTO_BYTES / (numel_of(self.shapes(1.0)) * itemsize))


def numel_of(shapes: Shapes) -> int:
    """Elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder:
    """Sizes of a decoder-only transformer."""

    vocab: int
    hidden: int
    inter: int
    """Of the MLP, or of one expert."""

    layers: int
    q_out: int
    kv_out: int
    tied: bool = False
    experts: int = 0
    head: int = 0
    """Size of the norms of queries and keys; 0: there are none, and projections have biases."""

    def shapes(self, factor: float) -> Shapes:
        """As the checkpoint names them."""

        def dim(size: int) -> int:
            return max(1, round(size * factor))

        hidden = dim(self.hidden)
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (dim(self.vocab), hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            found |= {prefix + name: shape for name, shape in self._layer(hidden, dim).items()}
        found["model.norm.weight"] = (hidden,)
        if not self.tied:
            found["lm_head.weight"] = (dim(self.vocab), hidden)
        return found

    def _layer(self, hidden: int, dim: Callable[[int], int]) -> Shapes:
        outputs = {"q": dim(self.q_out), "k": dim(self.kv_out), "v": dim(self.kv_out)}
        found: dict[str, tuple[int, ...]] = {}
        for name, out in outputs.items():
            found[f"self_attn.{name}_proj.weight"] = (out, hidden)
            if not self.head:
                found[f"self_attn.{name}_proj.bias"] = (out,)
        found["self_attn.o_proj.weight"] = (hidden, outputs["q"])
        if self.head:
            found |= {f"self_attn.{name}_norm.weight": (dim(self.head),) for name in ("q", "k")}
        if self.experts:
            found["mlp.gate.weight"] = (self.experts, hidden)
        for prefix in [f"mlp.experts.{i}." for i in range(self.experts)] or ["mlp."]:
            found[f"{prefix}gate_proj.weight"] = (dim(self.inter), hidden)
            found[f"{prefix}up_proj.weight"] = (dim(self.inter), hidden)
            found[f"{prefix}down_proj.weight"] = (hidden, dim(self.inter))
        return found | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _tiny(factor: float) -> Shapes:
    side = max(1, round(_TINY_SIDE * factor))
    return {f"block.{i // 100}.weight_{i % 100}": (side, side) for i in range(_TINY)}


def _large(factor: float) -> Shapes:
    side = max(1, round(_TINY_SIDE * factor))
    return {f"block.{i}.weight": (side * _TINY // _LARGE, side) for i in range(_LARGE)}


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="dense-0.5b",
            about="Qwen2-like, 24 layers, tied head: 290 tensors, 494M elements",
            build=_Decoder(vocab=151936, hidden=896, inter=4864, layers=24, q_out=896, kv_out=128, tied=True).shapes,
        ),
        Case(
            name="dense-7b",
            about="Qwen2-like, 28 layers: 339 tensors, 7.6G elements",
            build=_Decoder(vocab=152064, hidden=3584, inter=18944, layers=28, q_out=3584, kv_out=512).shapes,
        ),
        Case(
            name="moe",
            about="Qwen3-MoE-like, 12 layers of 128 experts: 4,719 tensors, 8.1G elements",
            build=_Decoder(
                vocab=151936, hidden=2048, inter=768, layers=12, q_out=4096, kv_out=512, experts=128, head=128
            ).shapes,
        ),
        Case(name="tiny", about=f"{_TINY:,} tensors of {_TINY_NUMEL:,} elements", build=_tiny),
        Case(
            name="large",
            about=f"{_LARGE} tensors of {_TINY_NUMEL * _TINY // _LARGE:,} elements: as many as in tiny",
            build=_large,
        ),
    )
}
