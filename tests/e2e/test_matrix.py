"""Every trainer with every engine and every family of models: after each sync the engine says what transformers says.

One program starts an engine, and trainers sync into it in turn. Marked `matrix` is what only `make test-all` runs.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.e2e.engines import KINDS, Kind
from tests.e2e.families import NEW_TOKENS, prompts
from tests.e2e.program import SYNCS
from tests.e2e.trainers import TRAINERS
from tests.engines.vllm_runner import run_program

Facts = dict[str, Any]

TIMEOUT_S = 560.0

QUICK: Mapping[tuple[str, str], Sequence[str]] = {
    ("hf-worker", "llama-tied"): tuple(TRAINERS),
    ("hf", "qwen3"): ("plain", "fsdp2"),
    ("hf-remote", "llama"): ("fsdp2",),
    ("hf-remote-turns", "qwen3-moe"): ("fsdp2",),
    ("vllm", "qwen3-moe"): ("plain", "checkpoint"),
    ("vllm-launcher", "qwen2"): ("fsdp2", "zero3"),
    ("vllm-workers", "qwen2-tied"): ("fsdp1", "lora"),
    ("sglang", "qwen3-tied"): ("fsdp2", "lora-fsdp2"),
    ("hf-worker-pull", "qwen3-moe"): ("plain", "fsdp2", "lora-fsdp2", "checkpoint"),
    ("vllm-workers-tp2-pull-part", "qwen3-moe"): ("fsdp2", "lora-fsdp2"),
    ("vllm-workers-tp2-pull-4", "llama"): ("fsdp2", "hsdp", "zero3"),
    ("sglang-tp2-pull-4", "llama"): ("fsdp2", "hsdp", "zero3"),
}
"""(engine, family) -> trainers: each trainer, each engine and each family once, and the quickest of what is pulled.

From two FSDP2 ranks `test_pull_failures` pulls everything, undisturbed at first.
"""


def cases() -> Iterator[Any]:
    """All combinations, program by program."""
    for kind, setting in KINDS.items():
        needs = [getattr(pytest.mark, setting.needs)] if setting.needs else []
        for family in setting.families:
            for trainer in TRAINERS:
                more = [] if trainer in QUICK.get((kind, family), ()) else [pytest.mark.matrix]
                yield pytest.param(kind, family, trainer, marks=[*needs, *more], id=f"{kind}-{family}-{trainer}")


class Programs:
    """Runs a program when its first result is asked for, with those trainers that were selected."""

    def __init__(self, items: Sequence[Any], factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._chosen: dict[tuple[str, str], list[str]] = {}
        self._done: dict[tuple[str, str], tuple[Facts, str]] = {}
        for item in items:
            if item.function is test_tokens_after_each_sync:
                asked = item.callspec.params
                self._chosen.setdefault((asked["kind"], asked["family"]), []).append(asked["trainer"])

    def result(self, kind: str, family: str) -> tuple[Facts, str]:
        """Facts by trainer as far as the program came, and its last words if it failed."""
        if (kind, family) not in self._done:
            self._done[kind, family] = self._run(kind, family)
        return self._done[kind, family]

    def _run(self, kind: str, family: str) -> tuple[Facts, str]:
        folder = self._factory.mktemp(f"{kind}-{family}")
        arguments = [kind, family, ",".join(self._chosen[kind, family]), folder]
        words = ""
        try:
            run_program(
                "tests.e2e.program", arguments, folder / "log.txt", ranks=KINDS[kind].ranks, TIMEOUT_S=TIMEOUT_S
            )
        except pytest.fail.Exception as failure:
            words = str(failure)
        found = folder / "facts.json"
        return json.loads(found.read_text()) if found.is_file() else {}, words


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs([item for item in request.session.items if hasattr(item, "function")], tmp_path_factory)


def check_pull(found: Facts, kind: Kind) -> None:
    """Each byte that is needed was read once, and where workers can be looked into, all they have is right."""
    looked_into = kind.path == "pull" and kind.needs is not None
    if looked_into:
        assert found["pulled bytes"] == [found["least bytes"]] * SYNCS
    else:  # transformers' modules have buffers and fused experts, which no checkpoint names
        assert [nbytes > 0 for nbytes in found["pulled bytes"]] == [kind.path == "pull"] * SYNCS
    assert found["through loader"] or not kind.travel
    assert len(found["bits"]) == SYNCS * looked_into
    for bits in found["bits"]:
        assert len(bits["parameters"]) == kind.engines * kind.tp
        assert min(bits["parameters"]) > 12
        assert bits["differ"] == bits["not loaded"] == bits["not as at the start"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family", "trainer"), list(cases()))
def test_tokens_after_each_sync(programs: Programs, kind: str, family: str, trainer: str) -> None:
    facts, words = programs.result(kind, family)
    assert trainer in facts, words
    for expected, engines in zip(facts["launch"]["expected"], facts["launch"]["tokens"], strict=True):
        assert all(tokens == expected for tokens in engines), "differs from transformers before any sync"
    found = facts[trainer]
    assert len(found["expected"]) == len(found["tokens"]) == SYNCS
    check_pull(found, KINDS[kind])
    for expected, engines in zip(found["expected"], found["tokens"], strict=True):
        assert [len(answer) for answer in expected] == [NEW_TOKENS] * len(prompts())
        assert engines
        assert all(tokens == expected for tokens in engines)
    assert not words, words


def test_the_quick_part_has_each_trainer_engine_and_family_once() -> None:
    """A kind of engine with a number or a way in its name is another way to run one that is there."""
    assert {trainer for trainers in QUICK.values() for trainer in trainers} == set(TRAINERS)
    widest = {kind for kind, setting in KINDS.items() if len(setting.families) > 2}
    assert {kind for kind, _ in QUICK} >= widest
    assert all(family in KINDS[kind].families for kind, family in QUICK)
