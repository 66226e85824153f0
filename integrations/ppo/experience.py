"""What a model said, and what is known about it: from the engine's answer to what an optimizer step reads."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One prompt and one answer."""

    prompt: str
    response: str
    """Decoded without special tokens."""

    prompt_ids: list[int]
    response_ids: list[int]
    """At least one; up to and with the end-of-sequence token."""

    engine_log_probs: list[float]
    """What the engine says about `response_ids`."""

    label: str | None = None
    """From the data, for reward functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A batch, padded on the right. Column t of all but the first two belongs to token t + 1 and its prediction."""

    sequences: torch.Tensor
    """Token ids, int64 `[batch, length]`."""

    attention_mask: torch.Tensor
    """bool `[batch, length]`: false for padding."""

    action_mask: torch.Tensor
    """bool `[batch, length - 1]`: true for tokens that were generated."""

    log_probs: torch.Tensor
    """Of the actor before it was trained on this: of the old policy. float32 `[batch, length - 1]`, as all below."""

    engine_log_probs: torch.Tensor
    """Of the engine that sampled it, which may have older weights than the actor, and rounds in its own way."""

    reference_log_probs: torch.Tensor
    """Equal to `log_probs` where there is no reference."""

    values: torch.Tensor
    """0 where there is no critic."""

    advantages: torch.Tensor
    returns: torch.Tensor

    def to(self, device: torch.device) -> "Experience":
        """On another device."""
        return Experience(**{one.name: getattr(self, one.name).to(device) for one in fields(self)})

    def rows(self) -> list["Experience"]:
        """Each sequence alone, in host memory and without padding."""
        cut = self.to(torch.device("cpu"))
        lengths = cut.attention_mask.sum(1).tolist()
        return [
            Experience(
                **{
                    one.name: getattr(cut, one.name)[row : row + 1, : length - (one.name not in _WHOLE)].clone()
                    for one in fields(self)
                }
            )
            for row, length in enumerate(lengths)
        ]


_WHOLE = ("sequences", "attention_mask")


def collate(rows: Sequence[Experience]) -> Experience:
    """One batch of single sequences, padded with zeros: nobody reads what is there."""
    padded = {
        one.name: pad_sequence([getattr(row, one.name)[0] for row in rows], batch_first=True)
        for one in fields(Experience)
    }
    return Experience(**padded)


def padded(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sequences, attention_mask, action_mask) of an `Experience`."""
    rows = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    sequences = pad_sequence(rows, batch_first=True)
    time = torch.arange(sequences.shape[1])
    ends = torch.tensor([len(row) for row in rows])[:, None]
    starts = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    return sequences, time < ends, ((time >= starts) & (time < ends))[:, 1:]
