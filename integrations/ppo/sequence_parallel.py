"""Sequence parallelism as in DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509).

Each rank of a group has a slice of every sequence. For attention tokens and heads change places: a rank then has all
tokens of some heads.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from integrations.ppo.errors import ConflictError
from integrations.ppo.groups import engine_groups

ATTENTION = "ulysses"
"""What transformers knows it by."""


class SequenceParallel:
    """The ranks that share their sequences with this one."""

    def __init__(self, sp_size: int) -> None:
        """*Collective.* Raises `ConflictError` if `sp_size` is no divisor of the number of ranks."""
        from transformers import AttentionInterface, AttentionMaskInterface

        neighbours, _ = engine_groups(dist.get_world_size(), sp_size)
        groups = [dist.new_group(ranks) for ranks in neighbours]
        self.size, self.place = sp_size, dist.get_rank() % sp_size
        self._group: Any = groups[dist.get_rank() // sp_size]
        AttentionInterface.register(ATTENTION, self._attention)
        AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)

    def everybody(self, items: list[Any]) -> list[Any]:
        """*Collective.* The items of all ranks of the group, in their order."""
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, items, group=self._group)
        return [item for some in said for item in some]

    def padded_length(self, length: int) -> int:
        """The next length that can be cut into slices."""
        return -(-length // self.size) * self.size

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice of `[batch, length, ...]`."""
        return tensor.chunk(self.size, 1)[self.place]

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """*Collective.* All slices together. What follows is the same on all ranks of the group, gradients too."""
        found: torch.Tensor = _Whole.apply(tensor, self)  # type: ignore[no-untyped-call]
        return found

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' interface: `[batch, heads, slice, head_dim]` -> `[batch, slice, heads, head_dim]`.

        Padding is on the right: no token that counts sees it, and causality is all the mask that is needed.

        Raises `ConflictError` for a model that attends in another way: its numbers would be wrong.
        """
        windowed = sliding_window is not None and sliding_window < query.shape[2] * self.size
        for other, said in ((windowed, "a window"), (softcap is not None, "a cap"), (s_aux is not None, "sinks")):
            if other:
                raise ConflictError(f"--sp_size attends to all that is before a token; this model has {said}")
        repeats = query.shape[1] // key.shape[1]
        if key.shape[1] % self.size:  # else each rank gets whole groups of heads
            key, value = (one.repeat_interleave(repeats, 1) for one in (key, value))
        query, key, value = (self._swap(one, 1, 2) for one in (query, key, value))
        output = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
        return self._swap(output, 2, 1).transpose(1, 2).contiguous(), None

    def _swap(self, tensor: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        found: torch.Tensor = _Exchange.apply(tensor, self, scatter, gather)  # type: ignore[no-untyped-call]
        return found

    def exchange(self, tensor: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        """*Collective.* Cut along dim `scatter`, send each part to its rank, join what comes along dim `gather`."""
        parts = torch.stack([part.contiguous() for part in tensor.chunk(self.size, scatter)])
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=self._group)
        return torch.cat(list(arrived), gather)

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        """*Collective.* `whole`, without gradients."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, 1)


class _Exchange(torch.autograd.Function):
    """`SequenceParallel.exchange`; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: SequenceParallel, scatter: int, gather: int) -> torch.Tensor:
        ctx.ranks, ctx.dims = ranks, (gather, scatter)
        return ranks.exchange(tensor, scatter, gather)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.ranks.exchange(grads[0], *ctx.dims), None, None, None


class _Whole(torch.autograd.Function):
    """`SequenceParallel.join`. All ranks go on alike and their gradients are averaged later, so each counts for all."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: SequenceParallel) -> torch.Tensor:
        ctx.ranks = ranks
        return ranks.join(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.own(grads[0]) * ctx.ranks.size, None
