"""Experience in and out of the buffer."""

from dataclasses import fields

import pytest
import torch

from integrations.ppo.experience import Experience, collate
from integrations.ppo.replay_buffer import ReplayBuffer
from tests.ppo.samples import experience

LENGTHS = [(3, 5), (1, 1), (8, 2), (2, 7)]


def same(one: Experience, other: Experience) -> bool:
    return all(torch.equal(getattr(one, part.name), getattr(other, part.name)) for part in fields(Experience))


def test_rows_have_no_padding_and_make_the_same_batch() -> None:
    batch = experience(LENGTHS)
    rows = batch.rows()
    assert [row.sequences.shape[1] for row in rows] == [sum(lengths) for lengths in LENGTHS]
    assert all(bool(row.attention_mask.all()) for row in rows)
    assert [int(row.action_mask.sum()) for row in rows] == [response for _, response in LENGTHS]
    assert same(collate(rows), batch)


def test_a_step_has_every_sequence_once() -> None:
    buffer = ReplayBuffer()
    buffer.append(experience(LENGTHS))
    buffer.append(experience(LENGTHS, seed=1))
    steps = list(buffer.steps(seed=0, rows=4, micro_rows=2))
    assert [[len(one.sequences) for one in step] for step in steps] == [[2, 2], [2, 2]]
    seen = [tuple(row.sequences[0].tolist()) for step in steps for one in step for row in one.rows()]
    held = [tuple(row.sequences[0].tolist()) for seed in (0, 1) for row in experience(LENGTHS, seed).rows()]
    assert sorted(seen) == sorted(held)
    assert seen != held, "nothing was shuffled"


def test_the_order_belongs_to_the_seed() -> None:
    buffer = ReplayBuffer()
    buffer.append(experience(LENGTHS))
    orders = [[one.sequences.tolist() for step in buffer.steps(seed, 4, 1) for one in step] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_sizes_that_do_not_fit() -> None:
    buffer = ReplayBuffer()
    buffer.append(experience(LENGTHS))
    for rows, micro_rows in ((3, 1), (4, 3)):
        with pytest.raises(ValueError, match="do not go into"):
            next(buffer.steps(0, rows, micro_rows))


def test_state_is_bit_exact() -> None:
    buffer, other = ReplayBuffer(), ReplayBuffer()
    buffer.append(experience(LENGTHS))
    other.load_state_dict(buffer.state_dict())
    assert len(other) == 4
    for one, two in zip(buffer.steps(5, 4, 2), other.steps(5, 4, 2), strict=True):
        assert all(same(a, b) for a, b in zip(one, two, strict=True))
    buffer.clear()
    assert (len(buffer), len(other)) == (0, 4)
