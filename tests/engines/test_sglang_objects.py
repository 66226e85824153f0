"""What the SGLang adapter says of objects and arguments, without SGLang."""

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from wsync.adapters.engines.sglang import SGLangEngine
from wsync.adapters.engines.sglang_worker import SGLangLoader
from wsync.deadline import Deadline
from wsync.errors import ConfigError, EngineStateError, UnsupportedError
from wsync.registry import find_engine

ARGUMENTS = {"pp_size": 1, "dp_size": 1, "nnodes": 1, "speculative_algorithm": None, "disaggregation_mode": "null"}


def named(name: str, module: str, **attributes: object) -> Any:
    """An object of a class that is called so."""
    return type(name, (), {"__module__": module, **attributes})()


def engine(changed: Mapping[str, object] = ARGUMENTS, quantization: str | None = None) -> Any:
    """An engine that was started with `changed`."""
    manager = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization))
    arguments = SimpleNamespace(**{**ARGUMENTS, **changed})
    return named("Engine", "sglang.srt.entrypoints.engine", server_args=arguments, tokenizer_manager=manager)


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that says which version it is."""
    module: Any = ModuleType("sglang")
    module.__version__ = "0.5.20.post1"
    monkeypatch.setitem(sys.modules, "sglang", module)
    return module


@pytest.mark.parametrize(
    ("name", "module", "matches"),
    [
        ("Engine", "sglang.srt.entrypoints.engine", True),
        ("Engine", "somewhere", False),
        ("ServerArgs", "sglang.srt.server_args", False),
    ],
)
def test_matches_by_name_and_package(name: str, module: str, matches: bool) -> None:
    assert SGLangEngine.matches(named(name, module)) is matches


def test_a_subclass_of_the_users_own_matches() -> None:
    base = type(named("Engine", "sglang.srt.entrypoints.engine"))
    assert find_engine(type("Mine", (base,), {"__module__": "mine"})()) is SGLangEngine


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("pp_size", 2),
        ("dp_size", 2),
        ("nnodes", 2),
        ("speculative_algorithm", "EAGLE"),
        ("disaggregation_mode", "decode"),
    ],
)
def test_what_is_not_supported_is_named(version: Any, argument: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"{argument}={value!r} is not supported"):
        SGLangEngine(engine({argument: value}))


def test_quantised_models_are_refused(version: Any) -> None:
    with pytest.raises(UnsupportedError, match="quantization='fp8' is not supported"):
        SGLangEngine(engine(quantization="fp8"))


@pytest.mark.parametrize("other", ["0.5.16", "0.5.24", "0.6.0"])
def test_other_versions_are_refused(version: Any, other: str) -> None:
    version.__version__ = other
    with pytest.raises(UnsupportedError, match=f"{other} is not among .* allow_untested=True"):
        SGLangEngine(engine())


@pytest.mark.parametrize("saver", [False, True])
@pytest.mark.parametrize("backup", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_weights_leave_only_where_something_will_bring_them_back(level: int, backup: bool, saver: bool) -> None:
    """R55: a copy in host memory at level 1, the next sync at level 2. Which tags leave is said by name."""
    released: list[tuple[str, ...]] = []
    arguments = SimpleNamespace(device="cuda", enable_memory_saver=saver, enable_weights_cpu_backup=backup)
    sleeper = object.__new__(SGLangEngine)
    sleeper.name = "SGLang"
    sleeper._calls = SimpleNamespace(  # type: ignore[assignment]
        engine=SimpleNamespace(server_args=arguments),
        in_flight=list,
        flush=lambda deadline: None,
        release=lambda tags, deadline: released.append(tags),
    )
    if saver and (backup or level == 2):
        sleeper.on_sleep(level, Deadline.after(5))
        assert released == [("weights", "kv_cache")]
        return
    with pytest.raises(ConfigError, match="keeps no weights while it sleeps" if saver else "enable_memory_saver=True"):
        sleeper.on_sleep(level, Deadline.after(5))
    assert released == []


def test_a_parameter_that_moved_stays_an_error_until_somebody_connects_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.23"))
    model = torch.nn.Linear(3, 4)
    loader = SGLangLoader(model, None)
    loader.settle()
    loader.begin()
    model.weight.data = model.weight.data.clone()
    with pytest.raises(EngineStateError, match=r"moved 1 parameter\(s\) while it loaded: weight"):
        loader.finish()
    for _ in range(2):
        with pytest.raises(EngineStateError, match=r"moved 1 parameter\(s\) since it was connected: weight"):
            loader.begin()
    loader.settle()
    loader.begin()
    loader.finish()
