"""The GPU suite as far as it goes without a GPU: what it refuses, what it makes of a case that fails, the table."""

import io
from collections.abc import Mapping

import pytest
import torch

from wsync.bench.cli import MISUSED, main
from wsync.bench.gpu import suite
from wsync.bench.gpu.models import DENSE, MOE, config_of, engine_side
from wsync.bench.gpu.outcome import Limit, Outcome
from wsync.bench.samples import Samples
from wsync.errors import ConfigError

TIMEOUT_S = 0.5


def test_options_of_the_host_suite_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "choose", lambda names: [])
    assert main(["--suite", "gpu", "--transport", "shm", "--bucket-mib", "4"]) == MISUSED
    assert "leave out --transport, --bucket-mib" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--suite", "gpu"]) == MISUSED
    assert "needs a CUDA device" in capsys.readouterr().err


def test_without_an_engine_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="need sglang and vllm: not installed"):
        suite.choose(None)


def test_only_cases_whose_engine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "sglang" else None)
    assert suite.choose(None) == ["sglang-ipc", "sglang-memory"]
    with pytest.raises(ConfigError, match="need vllm: not installed"):
        suite.choose(["sglang-ipc", "vllm-dense"])


def test_cases_for_which_there_are_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "vllm-pull-tp2" not in suite.choose(None)
    with pytest.raises(ConfigError, match="more GPUs than the 1 that torch sees: vllm-pull-tp2: 2"):
        suite.choose(["vllm-dense", "vllm-pull-tp2"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "vllm-pull-tp2" in suite.choose(None)


def test_a_rival_that_is_not_installed_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "checkpoint_engine" else object())
    chosen = suite.choose(None)
    assert "vllm-moonshot" not in chosen
    assert suite.left_out(chosen) == ["left out: vllm-moonshot; pip install checkpoint-engine"]
    with pytest.raises(ConfigError, match="need checkpoint_engine: not installed"):
        suite.choose(["vllm-dense", "vllm-moonshot"])


def test_a_case_that_takes_too_long_is_ended_and_is_a_row_that_is_not_right() -> None:
    result = suite.measure("vllm-dense", TIMEOUT_S)
    assert result["ok"] is False
    assert "nothing within 0.5 s" in result["error"]
    out = io.StringIO()
    suite.table([result], out)
    assert "failed" in out.getvalue()


def test_an_outcome_as_data_and_in_the_table() -> None:
    outcome = Outcome(
        case="vllm-dense",
        tensors=339,
        nbytes=15_200_000_000,
        samples=Samples(seconds=(0.02, 0.03, 0.01), references={"device copy": (0.01, 0.01, 0.01, 0.01)}),
        data_seconds=[0.011, 0.012, 0.013],
        limits=(Limit(reference="device copy", factor=1.3), Limit(reference="device copy", factor=1.25, data=True)),
        checks={"tokens": True, "bytes": False},
    )
    shown: Mapping[str, object] = outcome.as_json()
    whole, data = {"at_most": 1.3, "seconds": 0.02, "data": False}, {"at_most": 1.25, "seconds": 0.012, "data": True}
    assert shown["limits"] == [
        {"of": "device copy", "is": pytest.approx(2.0), **whole},
        {"of": "device copy", "is": pytest.approx(1.2), **data},
    ]
    assert shown["ok"] is False
    out = io.StringIO()
    suite.table([shown], out)
    head, line, data_line, wrong = out.getvalue().splitlines()
    assert head.split() == ["case", "tensors", "GB", "ms", "against", "is", "at", "most", "checks"]
    assert line.split() == [
        "vllm-dense",
        "339",
        "15.2",
        "20.0",
        "device",
        "copy",
        "2.00",
        "1.30",
        "1",
        "of",
        "2",
        "right",
    ]
    assert data_line.split()[3:5] == ["12.0", "data"]
    assert wrong == "vllm-dense: WRONG: bytes"


def test_nothing_checked_is_not_right() -> None:
    assert not Outcome(case="x").ok


@pytest.mark.parametrize(("shape", "count"), [(DENSE, 339), (MOE, 4719)])
def test_shapes_have_as_many_tensors_as_real_models(shape: str, count: int) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, torch.bfloat16))
    sides = dict(engine_side(model))
    assert len(sides) == count
    assert sum(tensor.numel() for tensor in sides.values()) == sum(one.numel() for one in model.parameters())
