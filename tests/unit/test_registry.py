"""Adapters are found by what an object is; nothing is imported before it is needed."""

import subprocess
import sys
import weakref
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

from wsync import registry
from wsync.errors import UnsupportedError
from wsync.protocols import Engine, Producer
from wsync.transports.inproc import InprocTransport


def members(contract: type) -> list[str]:
    return [name for name in {**contract.__annotations__, **vars(contract)} if not name.startswith("_")]


def complete(contract: type) -> Any:
    """An object that has everything the contract asks for."""
    return type("Mine", (), dict.fromkeys(members(contract), len))()


class Plugin:
    """What another distribution might add: it takes every module of its own framework."""

    name = "plugin"

    def __init__(self, obj: object = None) -> None:
        self.obj = obj

    @staticmethod
    def matches(obj: object) -> bool:
        return isinstance(obj, torch.nn.Linear)


def install(monkeypatch: pytest.MonkeyPatch, group: str, value: str) -> None:
    entries = EntryPoints([EntryPoint(name="plugin", value=value, group=group)])
    monkeypatch.setattr(registry, "entry_points", lambda group: entries.select(group=group))


BUILT_IN = ["inproc", "shm", "cuda_ipc", "nccl", "hccl", "gloo"]


def test_built_in_transports_in_order_of_preference() -> None:
    assert [transport.name for transport in registry.transports()] == BUILT_IN
    assert registry.transport("shm").name == "shm"
    assert [t.name for t in registry.transports_for("auto")] == BUILT_IN
    assert [t.name for t in registry.transports_for("shm")] == BUILT_IN


def test_an_unknown_transport_lists_what_is_there() -> None:
    for find in (registry.transport, registry.transports_for):
        with pytest.raises(
            UnsupportedError, match=r"'carrier-pigeon'; choose one of: cuda_ipc, gloo, hccl, inproc, nccl, shm"
        ):
            find("carrier-pigeon")


def test_a_transport_object_is_taken_if_it_is_one() -> None:
    mine = InprocTransport()
    assert registry.transports_for(mine) == [mine]
    with pytest.raises(UnsupportedError, match=r"builtins\.int; it must be a name or meet wsync\.Transport"):
        registry.transports_for(3)


def test_modules_find_their_producer() -> None:
    assert registry.find_trainer(torch.nn.Linear(2, 2)).__name__ == "ModuleProducer"


def test_a_model_that_generates_finds_the_embedded_engine() -> None:
    class Generates(torch.nn.Linear):
        def generate(self) -> None: ...

    assert registry.find_engine(Generates(2, 2)).__name__ == "HFEngine"


@pytest.mark.parametrize("contract", [Producer, Engine])
def test_what_meets_the_contract_is_taken_as_it_is(contract: type) -> None:
    find = registry.producer_for if contract is Producer else registry.engine_for
    mine = complete(contract)
    assert find(mine) is mine
    proxy = weakref.proxy(mine)
    assert find(proxy) is proxy


def test_the_error_says_what_was_seen_what_is_supported_and_what_is_missing() -> None:
    with pytest.raises(UnsupportedError) as caught:
        registry.engine_for({"model": 1})
    text = str(caught.value)
    for words in (
        "this engine is a builtins.dict",
        "vllm: vllm.LLM",
        "hf: a torch.nn.Module with generate()",
        "wsync.Engine",
    ):
        assert words in text
    with pytest.raises(UnsupportedError) as caught:
        registry.producer_for(None)
    for words in ("this actor is a builtins.NoneType", "fsdp:", "module:", "wsync.Producer (it lacks", "metadata"):
        assert words in str(caught.value)


def test_an_almost_complete_engine_is_told_what_it_lacks() -> None:
    almost = type("Almost", (), dict.fromkeys([m for m in members(Engine) if m != "pause"], len))()
    with pytest.raises(UnsupportedError, match=r"it lacks pause\)"):
        registry.engine_for(almost)


def test_entry_points_come_before_what_is_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "wsync.trainers", f"{__name__}:Plugin")
    linear = torch.nn.Linear(2, 2)
    found = registry.find_trainer(linear)
    assert found.__qualname__ == "Plugin"
    assert registry.find_trainer(torch.nn.Bilinear(2, 2, 2)).__name__ == "ModuleProducer"


def test_entry_points_add_transports_after_the_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "wsync.transports", f"{__name__}:Plugin")
    assert [t.name for t in registry.transports()] == [*BUILT_IN, "plugin"]
    assert registry.transport("plugin").name == "plugin"


def test_an_entry_point_that_cannot_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "wsync.transports", "no_such_module:Transport")
    with pytest.raises(
        UnsupportedError, match=r"plugin \(no_such_module:Transport\) cannot be imported.*no_such_module"
    ):
        registry.transport("plugin")


class Refuses:
    """A plugin that breaks when it is asked."""

    @staticmethod
    def matches(obj: object) -> bool:
        raise KeyError("no such table")


def test_a_broken_plugin_is_named_with_its_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fragile.py").write_text("raise ValueError('half an installation')\n")
    info = tmp_path / "wsync_fragile-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wsync-fragile\nVersion: 2.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = [
        ("fragile:Nothing", r"cannot be imported: ValueError: half an installation; .*pip uninstall wsync-fragile"),
        ("json:Nothing", r"cannot be imported: AttributeError: .*Nothing"),
        (f"{__name__}:Refuses", r"failed when asked whether it takes a .*Linear: KeyError: 'no such table'"),
    ]
    for target, words in broken:
        (info / "entry_points.txt").write_text(f"[wsync.trainers]\nglass = {target}\n")
        with pytest.raises(UnsupportedError, match=rf"glass \({target}, from wsync-fragile 2\.1\) {words}"):
            registry.find_trainer(torch.nn.Linear(1, 1))


def test_a_missing_extra_names_the_exact_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class LLM:
        __module__ = "vllm.entrypoints.llm"

    monkeypatch.setitem(sys.modules, "wsync.adapters.engines.vllm", None)
    with pytest.raises(UnsupportedError, match=r'pip install "wsync-rl\[vllm\]"'):
        registry.find_engine(LLM())


def test_importing_wsync_and_asking_for_adapters_imports_no_framework() -> None:
    code = (
        "import sys, torch, wsync\n"
        "from wsync import registry\n"
        "registry.transports(); registry.find_trainer(torch.nn.Linear(1, 1))\n"
        "try: registry.find_engine(object())\n"
        "except wsync.UnsupportedError: pass\n"
        "heavy = {'vllm', 'sglang', 'transformers', 'deepspeed', 'peft', 'safetensors'} & set(sys.modules)\n"
        "print(sorted(heavy), 'wsync.adapters.engines.vllm' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[] False", done.stderr
