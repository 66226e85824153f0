"""How the tokens of a batch go through a model: padded, packed into one row, or in slices over ranks."""

from typing import Any, Protocol

import torch

from integrations.ppo.sequence_parallel import SequenceParallel


class Layout(Protocol):
    """Of one batch; `[batch, length]` with padding on the right is what everybody else knows."""

    def inputs(self) -> dict[str, Any]:
        """What the model is called with."""
        ...

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[batch, length]` in this layout."""
        ...

    def put(self, numbers: torch.Tensor) -> torch.Tensor:
        """What a model said, `[rows, tokens, n]` in this layout, as `[batch, length, n]`. May be collective."""
        ...


class Padded:
    """As it is."""

    def __init__(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> None:
        self._sequences, self._mask = sequences, attention_mask

    def inputs(self) -> dict[str, Any]:
        """See `Layout`."""
        return {"input_ids": self._sequences, "attention_mask": self._mask, "use_cache": False}

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Layout`."""
        return tensor

    def put(self, numbers: torch.Tensor) -> torch.Tensor:
        """See `Layout`."""
        return numbers


class Packed:
    """All sequences in one row. transformers takes positions that begin anew, without a mask, for packed sequences."""

    def __init__(self, sequences: torch.Tensor, attention_mask: torch.Tensor) -> None:
        self._sequences, self._mask = sequences, attention_mask

    def inputs(self) -> dict[str, Any]:
        """See `Layout`."""
        positions = self.take(_positions(self._sequences))
        return {"input_ids": self.take(self._sequences), "position_ids": positions, "use_cache": False}

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Layout`: `[1, tokens]`."""
        return tensor[self._mask][None]

    def put(self, numbers: torch.Tensor) -> torch.Tensor:
        """See `Layout`. 0 where padding is."""
        whole = numbers.new_zeros(*self._mask.shape, numbers.shape[-1])
        return whole.masked_scatter(self._mask[..., None], numbers)


class Sliced:
    """A slice of every sequence, the others on the other ranks of a group."""

    def __init__(self, sequences: torch.Tensor, ranks: SequenceParallel) -> None:
        self._sequences, self._ranks = sequences, ranks

    def inputs(self) -> dict[str, Any]:
        """See `Layout`."""
        positions = self.take(_positions(self._sequences))
        return {"input_ids": self.take(self._sequences), "position_ids": positions, "use_cache": False}

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Layout`. Filled up with zeros to a length that can be cut."""
        missing = self._ranks.padded_length(tensor.shape[1]) - tensor.shape[1]
        return self._ranks.own(torch.nn.functional.pad(tensor, (0, missing)))

    def put(self, numbers: torch.Tensor) -> torch.Tensor:
        """See `Layout`. Collective."""
        return self._ranks.whole(numbers)[:, : self._sequences.shape[1]]


def _positions(sequences: torch.Tensor) -> torch.Tensor:
    return torch.arange(sequences.shape[1], device=sequences.device).expand_as(sequences)
