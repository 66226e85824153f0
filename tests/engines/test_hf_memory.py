"""What sleep does to memory: storages, objects, and the resident bytes of a real process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.engines.hf_models import llama, same_bits, seeded
from wsync.adapters.engines.hf_memory import own_memory, release


class Shared(nn.Module):
    """A tied parameter, two parameters in one storage, a buffer inside a parameter's storage, odd layouts."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(12)
        self.first = nn.Parameter(base[:5])
        self.second = nn.Parameter(base[5:9])
        self.tied = self.first
        self.register_buffer("inside", base[9:], persistent=False)
        self.turned = nn.Parameter(torch.randn(3, 4).T)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("count", torch.tensor(7))


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in (*module.named_parameters(), *module.named_buffers())}


def test_every_storage_is_freed_and_restored_once() -> None:
    module = Shared()
    before, strides = snapshot(module), module.turned.stride()
    released = release(module, keep_weights=True)
    assert released.nbytes == 12 * 4 + 12 * 4 + 4 + 8
    assert {tensor.untyped_storage().nbytes() for tensor in (*module.parameters(), *module.buffers())} == {0}
    released.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(module).items())
    assert module.tied is module.first
    assert module.turned.stride() == strides
    assert module.first.untyped_storage().data_ptr() == module.second.untyped_storage().data_ptr()
    released.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(module).items())


def test_level_2_keeps_what_shares_memory_with_a_buffer_only() -> None:
    module = Shared()
    before = snapshot(module)
    released = release(module, keep_weights=False)
    released.restore()
    after = snapshot(module)
    for name in ("inside", "count", "first", "second"):
        assert torch.equal(after[name], before[name])
    with torch.no_grad():
        module.turned.normal_()
    assert module.turned.shape == (4, 3)


def test_nothing_changes_when_there_is_no_room_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Shared()
    before = snapshot(module)

    def no_room(storage: torch.UntypedStorage) -> torch.Tensor:
        raise RuntimeError("no room")

    monkeypatch.setattr("wsync.adapters.engines.hf_memory._to_host", no_room)
    with pytest.raises(RuntimeError, match="no room"):
        release(module, keep_weights=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(module).items())


def test_parameters_in_a_mapped_checkpoint_get_memory_of_their_own(tmp_path: Path) -> None:
    seeded(llama, 1).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    objects = list(model.parameters())
    assert not all(parameter.untyped_storage().resizable() for parameter in objects), "nothing to do any more"
    own_memory(model)
    assert all(parameter.untyped_storage().resizable() for parameter in objects)
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert same_bits(model, seeded(llama, 1))
    pointers = [parameter.data_ptr() for parameter in objects]
    own_memory(model)
    assert pointers == [parameter.data_ptr() for parameter in objects], "the second time there is nothing to do"


@pytest.mark.parametrize("kind", ["built", "loaded"])
def test_resident_memory_really_falls(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engines.hf_rss", kind, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    found = json.loads(done.stdout.splitlines()[-1])  # other libraries print too
    nbytes = found["nbytes"]
    assert nbytes > 350e6
    # Pages of a mapped checkpoint that were never touched do not count before.
    assert found["before"] - found["asleep"] > 0.7 * nbytes
    assert found["awake"] - found["asleep"] > 0.9 * nbytes
    assert found["awake"] - found["asleep again"] > 0.9 * nbytes
    assert found["awake"] - found["before"] < 0.3 * nbytes
