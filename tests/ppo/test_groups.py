"""Who shares an engine, and what goes around there."""

import pytest

from integrations.ppo.errors import ConflictError
from integrations.ppo.groups import engine_groups
from tests.ppo.rank_steps import gathered
from wsync.testing.ranks import run_ranks


@pytest.mark.parametrize(
    ("world_size", "tp_size", "parallel", "others"),
    [
        (8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (8, 4, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (2, 1, [[0], [1]], [[0, 1]]),
        (2, 2, [[0, 1]], [[0], [1]]),
    ],
)
def test_groups(world_size: int, tp_size: int, parallel: list[list[int]], others: list[list[int]]) -> None:
    assert engine_groups(world_size, tp_size) == (parallel, others)


@pytest.mark.parametrize("tp_size", [0, 3, 16])
def test_sizes_that_do_not_fit(tp_size: int) -> None:
    with pytest.raises(ConflictError, match="no divisor of 8 ranks"):
        engine_groups(8, tp_size)


@pytest.mark.slow
def test_uneven_prompts_keep_their_order() -> None:
    """R77. Four ranks, two engines; one rank has no prompt at all."""
    texts = [[100], [3 + byte for byte in b"23456789"]]
    for rank, facts in enumerate(run_ranks(gathered, 4, timeout_s=60)):
        said = [answer.output_token_ids for answer in facts["answers"]]
        assert said == [[sum(prompt), rank] for prompt in facts["asked"]], "of another prompt, or by another seed"
        assert [answer.prompt_token_ids for answer in facts["answers"]] == facts["asked"]
        assert facts["batch"] == [4, 4, 5, 5][rank], "all prompts of an engine's ranks in one batch"
        assert [answer.prompt_token_ids for answer in facts["to texts"]] == texts[:rank], "long ones keep their ends"
        assert [answer.output_token_ids for answer in facts["to texts"]] == [[sum(ids), rank] for ids in texts[:rank]]
        assert [len(some) for some in facts["fewer"]] == [int(rank == 0), 0]
        assert "pass one of them" in facts["neither"]
        assert "pass one of them" in facts["both"]
