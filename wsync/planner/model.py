"""A decoder-only transformer as names and shapes: what it counts, and how wide its layers are."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from wsync.bench.cases import Shapes, numel_of

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")
_LINEAR = re.compile(r"(self_attn\.[qkvo]_proj|mlp\.(shared_expert\.)?(gate|up|down)_proj)\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """Of one layer, in elements a token."""

    hidden: int
    q: int
    kv: int
    """Of keys; values are as many."""

    inter: int
    """Of the MLP, or of all experts that a token goes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a prediction needs to know of an architecture."""

    name: str
    shapes: Shapes
    """Every parameter once, by its name in checkpoints; experts one by one, all under the names that Qwen's have."""

    head_dim: int
    """Of one attention head, in elements."""

    experts_per_token: int = 0
    """Of a mixture of experts."""

    widths: Sequence[Width] = field(init=False)
    """Of every layer."""

    trained_shapes: Shapes = field(init=False)
    """As the module in training has them: the experts of a layer stacked in two tensors, as transformers 5 does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", _widths(self))
        object.__setattr__(self, "trained_shapes", _stacked(self.shapes))

    @property
    def numel(self) -> int:
        """Parameters."""
        return numel_of(self.shapes)

    @property
    def vocab(self) -> int:
        """Tokens that there are."""
        return self.shapes["model.embed_tokens.weight"][0]

    @property
    def hidden(self) -> int:
        """Elements between layers, a token."""
        return self.shapes["model.embed_tokens.weight"][1]

    @property
    def heads(self) -> int:
        """Of queries, in each layer."""
        return self.shapes["model.layers.0.self_attn.q_proj.weight"][0] // self.head_dim

    @property
    def kv_heads(self) -> int:
        """Of keys and of values, in each layer."""
        return self.shapes["model.layers.0.self_attn.k_proj.weight"][0] // self.head_dim

    def lora_targets(self) -> Shapes:
        """Weights that LoRA is put on: every linear layer of attention and MLPs, which stacked experts are not."""
        return {name: shape for name, shape in self.shapes.items() if _LINEAR.search(name)}

    def lora_shapes(self, rank: int) -> Shapes:
        """A `[rank, in]` and B `[out, rank]` of each target."""
        found = {}
        for name, (out, inner) in self.lora_targets().items():
            layer = name.removesuffix(".weight")
            found[f"{layer}.lora_A.weight"] = (rank, inner)
            found[f"{layer}.lora_B.weight"] = (out, rank)
        return found


def units_of(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """`shapes` by layer: prefix -> name without it -> shape. What is in no layer has the prefix ""."""
    found: dict[str, dict[str, tuple[int, ...]]] = {"": {}}
    for name, shape in shapes.items():
        layer = _LAYER.match(name)
        prefix = layer.group() if layer else ""
        found.setdefault(prefix, {})[name.removeprefix(prefix)] = shape
    return found


def _widths(model: Model) -> list[Width]:
    found = []
    _, *layers = units_of(model.shapes).values()
    for layer in layers:
        inter = layer.get("mlp.gate_proj.weight", (0,))[0]
        inter += layer.get("mlp.experts.0.gate_proj.weight", (0,))[0] * model.experts_per_token
        inter += layer.get("mlp.shared_expert.gate_proj.weight", (0,))[0]
        q, kv = (layer[f"self_attn.{name}_proj.weight"][0] for name in "qk")
        found.append(Width(hidden=model.hidden, q=q, kv=kv, inter=inter))
    return found


def _stacked(shapes: Shapes) -> Shapes:
    counts: Counter[str] = Counter()
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            found[name] = shape
            continue
        stack, which = expert.groups()
        if which == "down":
            counts[stack] += 1
            found[f"{stack}.gate_up_proj"] = (counts[stack], 2 * shape[1], shape[0])
            found[f"{stack}.down_proj"] = (counts[stack], *shape)
    return found


def ceil_div(number: int, parts: int) -> int:
    """The largest of `parts` parts of `number` that are as equal as can be."""
    return -(-number // parts)


def rows_of(shape: tuple[int, ...], parts: int) -> int:
    """Elements of the largest of `parts` parts of a tensor that is cut along dim 0."""
    return ceil_div(shape[0], parts) * math.prod(shape[1:])
