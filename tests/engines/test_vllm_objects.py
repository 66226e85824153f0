"""What the vLLM adapter says of objects, without vLLM."""

from typing import Any

import pytest

from wsync.adapters.engines.vllm import VLLMEngine
from wsync.errors import UnsupportedError
from wsync.registry import find_engine


def named(name: str, module: str) -> Any:
    """An object of a class that is called so."""
    return type(name, (), {"__module__": module})()


@pytest.mark.parametrize(
    ("name", "module", "matches"),
    [
        ("LLM", "vllm.entrypoints.llm", True),
        ("AsyncLLM", "vllm.v1.engine.async_llm", True),
        ("LLM", "tensorrt_llm", False),
        ("EngineArgs", "vllm.engine.arg_utils", False),
    ],
)
def test_matches_by_name_and_package(name: str, module: str, matches: bool) -> None:
    assert VLLMEngine.matches(named(name, module)) is matches


def test_a_subclass_of_the_users_own_matches() -> None:
    base = type(named("LLM", "vllm.entrypoints.llm"))
    assert VLLMEngine.matches(type("Mine", (base,), {"__module__": "mine"})())
    assert find_engine(type("Mine", (base,), {"__module__": "mine"})()) is VLLMEngine


def test_the_async_engine_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"async_llm\.AsyncLLM is not supported; use vllm\.LLM"):
        VLLMEngine(named("AsyncLLM", "vllm.v1.engine.async_llm"))
