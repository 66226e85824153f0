"""A folder of safetensors as the actor: by its index or whole, mapped, and refused in plain words if it is wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import wsync
from tests.engines.hf_models import FAMILIES, expected_tokens, same_bits, seeded
from wsync.adapters.trainers.checkpoint import CheckpointProducer
from wsync.errors import ConfigError, MismatchError, UnsupportedError
from wsync.group import Group
from wsync.plan import Plan
from wsync.testing.actors import resident_bytes

INDEX = "model.safetensors.index.json"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    bits = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(30, 7, generator=bits),
        "a.mask": torch.randint(0, 255, (3,), generator=bits, dtype=torch.uint8),
        "b.weight": torch.randn(5, generator=bits).to(torch.bfloat16),
        "c": torch.randn((), generator=bits),
    }


def write_sharded(folder: Path, seed: int = 0) -> None:
    whole = tensors(seed)
    files = {"a.weight": "1.safetensors", "a.mask": "1.safetensors", "b.weight": "2.safetensors", "c": "2.safetensors"}
    for file in sorted(set(files.values())):
        save_file({name: whole[name] for name in whole if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def opened(folder: Path, limit: int = 256) -> tuple[CheckpointProducer, Plan]:
    producer = CheckpointProducer(folder)
    plan = Plan.pack(producer.metadata(), limit)
    producer.prepare(plan, [0], Group(0, 1, None, 5.0))
    producer.open()
    return producer, plan


def in_full(producer: CheckpointProducer) -> dict[str, torch.Tensor]:
    found = {name: tensor.clone() for name, tensor in producer.named_tensors()}
    producer.close()
    return found


@pytest.mark.parametrize("sharded", [True, False])
def test_every_tensor_as_it_is_on_disk(tmp_path: Path, sharded: bool) -> None:
    if sharded:
        write_sharded(tmp_path)
    else:
        save_file(tensors(), tmp_path / "model.safetensors")
    producer, plan = opened(tmp_path)
    for bucket in plan.buckets:
        assert producer.references(bucket) is not None
    found = in_full(producer)
    assert found.keys() == tensors().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


def test_names_of_wrappers_are_taken_off(tmp_path: Path) -> None:
    names = {"module._orig_mod.a.weight": "a.weight", "b._checkpoint_wrapped_module.weight": "b.weight"}
    save_file({name: torch.rand(3) for name in names}, tmp_path / "model.safetensors")
    assert sorted(spec.name for spec in CheckpointProducer(tmp_path).metadata()) == ["a.weight", "b.weight"]


@pytest.mark.parametrize("family", FAMILIES)
def test_three_checkpoints_at_one_path_into_an_engine(tmp_path: Path, family: str) -> None:
    engine = seeded(FAMILIES[family], 9)
    for seed in range(3):
        actor = seeded(FAMILIES[family], seed)
        actor.save_pretrained(tmp_path, max_shard_size="100KB" if family == "llama" else "5GB")
        report = wsync.sync(str(tmp_path), engine, config=wsync.SyncConfig(bucket_bytes=8192, verify="digest"))
        assert report.version == seed + 1
        assert same_bits(actor, engine)
        assert expected_tokens(actor) == expected_tokens(engine)


def test_a_head_that_the_configuration_calls_tied_is_left_out(tmp_path: Path) -> None:
    actor = seeded(FAMILIES["tied qwen2"], 1)
    state = {name: tensor.clone() for name, tensor in actor.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    engine = seeded(FAMILIES["tied qwen2"], 2)
    with pytest.raises(
        MismatchError,
        match=r"lm_head\.weight: \S+ \S+ refuses it \(MismatchError: the model has no such tensor of its own",
    ):
        wsync.sync(tmp_path, engine)
    actor.config.save_pretrained(tmp_path)
    wsync.sync(tmp_path, engine)
    assert same_bits(actor, engine)


def test_files_are_mapped_and_not_loaded(tmp_path: Path) -> None:
    big = {f"w{i}": torch.rand(1 << 22) for i in range(8)}  # 128 MiB
    save_file(big, tmp_path / "model.safetensors")
    del big
    producer, plan = opened(tmp_path, 1 << 26)
    before = resident_bytes()
    assert len(plan.specs) == 8
    producer.close()
    producer.open()
    assert resident_bytes() - before < 32 << 20
    producer.close()


def test_what_is_written_during_a_sync_stops_it(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    producer, plan = opened(tmp_path)
    save_file(tensors(1), tmp_path / "new.safetensors")
    os.replace(tmp_path / "new.safetensors", tmp_path / "model.safetensors")
    slot = torch.empty(plan.capacity, dtype=torch.uint8)
    words = r"written while a sync read it: model\.safetensors"
    with pytest.raises(MismatchError, match=words):
        producer.stage(plan.buckets[0], slot)
    with pytest.raises(MismatchError, match=words):
        producer.references(plan.buckets[0])
    producer.close()
    producer.open()
    assert torch.equal(in_full(producer)["a.weight"], tensors(1)["a.weight"])


def test_another_model_at_the_same_path_needs_another_connect(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    producer, _ = opened(tmp_path)
    producer.close()
    for change in ({"a.weight": torch.rand(31, 7)}, {"a.mask": torch.rand(3)}, {"new": torch.rand(2)}):
        kept = {name: tensor for name, tensor in tensors().items() if name.startswith("a.")}
        save_file({**kept, **{n: t for n, t in change.items() if n != "new"}}, tmp_path / "1.safetensors")
        if "new" in change:
            index = json.loads((tmp_path / INDEX).read_text())
            index["weight_map"]["new"] = "3.safetensors"
            (tmp_path / INDEX).write_text(json.dumps(index))
            save_file(change, tmp_path / "3.safetensors")
        with pytest.raises(MismatchError, match="connect again"):
            producer.open()


def without(folder: Path) -> None:
    (folder / "2.safetensors").unlink()


def overwritten(file: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / file).write_text(text)

    return write


def emptied(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def cut_off(folder: Path) -> None:
    data = (folder / "2.safetensors").read_bytes()
    (folder / "2.safetensors").write_bytes(data[:-3])


def reindexed(change: dict[str, str | None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        places = {**index["weight_map"], **change}
        (folder / INDEX).write_text(json.dumps({"weight_map": {n: f for n, f in places.items() if f is not None}}))

    return write


def twice(folder: Path) -> None:
    save_file({"module.c": torch.rand(1)}, folder / "3.safetensors")
    reindexed({"module.c": "3.safetensors"})(folder)


def pickled(folder: Path) -> None:
    emptied(folder)
    torch.save(tensors(), folder / "pytorch_model.bin")


def adapter(folder: Path) -> None:
    pickled(folder)
    (folder / "adapter_config.json").write_text("{}")


WRONG: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "cut off": (cut_off, MismatchError, r"2\.safetensors \(\d+ bytes\) is no complete safetensors file"),
    "not one at all": (overwritten("2.safetensors", "hello you"), MismatchError, "no complete safetensors"),
    "missing file": (
        without,
        MismatchError,
        r"names 1 file\(s\) that are not there: 2\.safetensors",
    ),
    "missing name": (reindexed({"d": "2.safetensors"}), MismatchError, r"1 tensors are not in it \(d\), 0 are not"),
    "name not in the index": (reindexed({"c": None}), MismatchError, r"0 .* \(none\), 1 are not in the index \(c\)"),
    "twice": (twice, MismatchError, "c comes twice: as 'c' in .*2.safetensors and as 'module.c' in .*3.safetensors"),
    "outside": (reindexed({"c": "../2.safetensors"}), MismatchError, "which is no file of its folder"),
    "index that is none": (overwritten(INDEX, "[1]"), MismatchError, "is no index of safetensors"),
    "two layouts": (
        lambda folder: save_file(tensors(), folder / "model.safetensors"),
        MismatchError,
        "has both model.safetensors and model.safetensors.index.json",
    ),
    "pickled": (pickled, UnsupportedError, r"holds pytorch_model\.bin, which may run code.*save_pretrained\(\)"),
    "adapter": (adapter, UnsupportedError, "holds a LoRA adapter and no model"),
    "empty": (emptied, UnsupportedError, "has neither"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_anything_moves(tmp_path: Path, name: str) -> None:
    write_sharded(tmp_path)
    spoil, error, words = WRONG[name]
    spoil(tmp_path)
    with pytest.raises(error, match=words):
        CheckpointProducer(tmp_path).metadata()


def test_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder; pass the folder of a safetensors checkpoint"):
        wsync.connect("some-org/some-model", None)
