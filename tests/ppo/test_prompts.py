"""Where prompts come from, and a stream that goes on where another one stopped."""

import json
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from integrations.ppo.errors import ConflictError
from integrations.ppo.prompts import Prompt, PromptDataset, PromptStream, from_jsonl, from_toy


def stream(rank: int = 0, number: int = 10) -> PromptStream:
    dataset = PromptDataset([Prompt(text=str(index)) for index in range(number)])
    sampler: DistributedSampler[Prompt] = DistributedSampler(dataset, 2, rank, shuffle=True, drop_last=True)
    return PromptStream(DataLoader(dataset, 2, sampler=sampler, drop_last=True, collate_fn=list))


def texts(source: PromptStream, batches: int) -> list[str]:
    return [prompt.text for _ in range(batches) for prompt in next(source)]


def test_ranks_share_an_epoch_and_epochs_differ() -> None:
    first = [texts(stream(rank), 2) for rank in (0, 1)]
    assert len({*first[0], *first[1]}) == 8
    both = texts(stream(), 4)
    assert both[:4] != both[4:]


@pytest.mark.parametrize("taken", range(5))
def test_a_stream_goes_on_where_another_one_was(taken: int) -> None:
    whole, other, resumed = stream(), stream(), stream()
    expected = texts(whole, 7)
    texts(other, taken)
    resumed.load_state_dict(other.state_dict())
    assert texts(resumed, 7 - taken) == expected[2 * taken :]


def test_too_few_prompts() -> None:
    with pytest.raises(ConflictError, match="--rollout_batch_size"):
        stream(number=3)


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows: list[dict[str, object]] = [{"question": "2 + 2?", "label": 4}, {"question": "a?", "label": None}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = from_jsonl(str(file), "question", "label")
    assert [found[index] for index in range(len(found))] == [Prompt(text="2 + 2?", label="4"), Prompt(text="a?")]
    with pytest.raises(ConflictError, match="line 1: no text under 'prompt'; it has question, label"):
        from_jsonl(str(file), "prompt", "label")


def test_labels_that_are_no_text_are_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "label": {"k": [true, "x"]}}\n')
    assert from_jsonl(str(file), "prompt", "label")[0].label == '{"k": [true, "x"]}'


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_prompts(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConflictError, match="has no lines"):
        from_jsonl(str(file), "prompt", "label")


def test_toy_prompts_are_uneven_and_belong_to_the_seed() -> None:
    one, same, other = from_toy(50, 0), from_toy(50, 0), from_toy(50, 1)
    assert len({len(one[index].text) for index in range(50)}) > 3
    assert [one[index] for index in range(50)] == [same[index] for index in range(50)]
    assert one[0] != other[0]
