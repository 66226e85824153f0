"""Adapters alone: from a PEFT model in training into that of an engine, whose base weights are not touched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

import wsync
from tests.engines.hf_models import FAMILIES, expected_tokens, seeded
from wsync.adapters.engines.hf import HFEngine
from wsync.adapters.trainers.lora_adapter import SCALING, AdapterProducer
from wsync.errors import ConfigError, EngineStateError, MismatchError, UnsupportedError
from wsync.testing.chaos import ChaosTransport, Fault
from wsync.transports.shm import ShmTransport

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

ALONE = wsync.SyncConfig(lora="adapter", bucket_bytes=4096, verify="digest")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": "all-linear"},
    "dora": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "rslora and a head": {"target_modules": ["q_proj"], "use_rslora": True, "modules_to_save": ["lm_head"]},
}


def tuned(family: str, seed: int, **options: Any) -> Any:
    """The base weights of seed 1 under a random adapter of `seed`."""
    torch.manual_seed(seed)
    settings = {"r": 4, "init_lora_weights": False, "lora_alpha": 4 + seed, **options}
    return get_peft_model(seeded(FAMILIES[family], 1), LoraConfig(task_type="CAUSAL_LM", **settings)).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3 moe"])
def test_three_syncs_give_the_actors_tokens(family: str, kind: str) -> None:
    target = tuned(family, 0, **KINDS[kind])
    before = {name: p.clone() for name, p in target.named_parameters() if not p.requires_grad}
    for seed in (1, 2, 3):
        actor = tuned(family, seed, **KINDS[kind])
        report = wsync.sync(actor, target, config=ALONE)
        assert expected_tokens(target) == expected_tokens(actor)
        mine, theirs = get_peft_model_state_dict(actor), get_peft_model_state_dict(target)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        # Each layer has a scalar besides: alpha is another one in each actor.
        assert report.tensors - len(mine) == sum(name.endswith(("lora_A.weight",)) for name in mine)
    assert all(torch.equal(p, before[name]) for name, p in target.named_parameters() if name in before)


def test_names_are_those_of_pefts_files_and_layers_stay_together() -> None:
    actor = tuned("llama", 1, **KINDS["rslora and a head"])
    specs = AdapterProducer(actor).metadata()
    names = {spec.name for spec in specs if not spec.name.endswith(SCALING)}
    assert names == set(get_peft_model_state_dict(actor))
    layer = [spec for spec in specs if spec.atomic_group == "base_model.model.model.layers.0.self_attn.q_proj"]
    assert sorted(spec.name.rpartition("q_proj.")[2] for spec in layer) == [
        "lora_A.weight",
        "lora_B.weight",
        "lora_scaling",
    ]


def test_never_the_new_a_with_the_old_b() -> None:
    """A sync that breaks in the middle leaves an engine that refuses; one before the first byte, the old adapter."""
    target, actor = tuned("llama", 1, **KINDS["plain"]), tuned("llama", 2, **KINDS["plain"])
    old = expected_tokens(target)
    for bucket in (0, 2):
        transport = ChaosTransport(ShmTransport(), Fault(kind="raise", bucket=bucket))
        config = wsync.SyncConfig(lora="adapter", bucket_bytes=4096, num_slots=1, transport=transport)
        with wsync.connect(actor, target, config=config) as session, pytest.raises(wsync.TransportError):
            session.sync()
        if bucket == 0:
            assert expected_tokens(target) == old
    tokens = torch.tensor([[3, 1]])
    uses: list[Callable[[], object]] = [
        lambda: target(input_ids=tokens),
        lambda: target.generate(input_ids=tokens, max_new_tokens=2),
        lambda: HFEngine(target).generate([[3, 1]], max_new_tokens=2),
    ]
    for use in uses:
        with pytest.raises(EngineStateError):
            use()
    wsync.sync(actor, target, config=ALONE)
    assert expected_tokens(target) == expected_tokens(actor)


def test_an_adapter_does_not_bring_dropped_base_weights_back() -> None:
    target, actor = tuned("llama", 1, **KINDS["plain"]), tuned("llama", 2, **KINDS["plain"])
    engine = HFEngine(target)
    with wsync.connect(actor, target, config=ALONE) as session:
        session.sync()
        engine.sleep(1)
        engine.wake_up()
        session.sync()
        assert expected_tokens(target) == expected_tokens(actor)
        engine.sleep(2)
        engine.wake_up()
        with pytest.raises(wsync.PeerError, match="no whole base weights, as a sleep of level 2 dropped them"):
            session.sync()
    with pytest.raises(wsync.PeerError, match="sleep at level 1"):
        wsync.sync(actor, target, config=ALONE)
    with pytest.raises(EngineStateError, match="no weights since its level-2 sleep"):
        target(input_ids=torch.tensor([[3, 1]]))


def test_what_does_not_fit_is_refused_before_anything_moves() -> None:
    actor, plain, target = tuned("llama", 1, **KINDS["plain"]), seeded(FAMILIES["llama"], 1), tuned("llama", 2, r=8)
    before = [p.clone() for p in (*plain.parameters(), *target.parameters())]
    with pytest.raises(MismatchError, match=r"an adapter alone.*lora='merged' suits every other engine"):
        wsync.sync(actor, plain, config=ALONE)
    with pytest.raises(MismatchError, match=r"takes an adapter alone, SyncConfig\(lora='adapter'\)"):
        wsync.sync(actor, target)
    with pytest.raises(MismatchError, match=r"lora_A.weight: .*the engine's adapter wants \[8, 64\]"):
        wsync.sync(tuned("llama", 1), target, config=ALONE)
    with pytest.raises(UnsupportedError, match="with lora='adapter', a module with one active LoRA adapter"):
        wsync.sync(plain, target, config=ALONE)
    actor.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    actor.base_model.set_adapter(["default", "other"])
    with pytest.raises(UnsupportedError, match=r"2 adapters are active \(default, other\)"):
        wsync.sync(actor, target, config=ALONE)
    with pytest.raises(ConfigError, match="lora is 'both'; choose one of merged, adapter"):
        wsync.SyncConfig(lora="both")  # type: ignore[arg-type]
    assert all(map(torch.equal, before, (*plain.parameters(), *target.parameters())))
