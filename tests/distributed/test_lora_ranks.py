"""PEFT LoRA under `fully_shard`, on real ranks: each merges its own part, and no rank ever has a full base weight."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

import wsync
from tests.distributed.exchange_steps import Case, Outcome, make_group, plan_of, run_cases, sync
from tests.distributed.sharded_models import full_tensors, llama, moe
from tests.unit.lora_models import MERGEABLE, Zoo, config, merged, randomised
from wsync.adapters.engines.hf import HFEngine
from wsync.adapters.trainers import lora
from wsync.adapters.trainers.lora import LoRAProducer
from wsync.adapters.trainers.lora_adapter import SCALING, AdapterProducer
from wsync.adapters.trainers.lora_merge import merge
from wsync.errors import RankError, UnsupportedError
from wsync.testing.ranks import Rank, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft.*")

SHARDED = [name for name in MERGEABLE if not name.startswith("dora")]
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def zoo(name: str) -> Any:
    torch.manual_seed(1)
    return randomised(MERGEABLE[name](), 2)


def causal(make: Callable[..., Any], **options: Any) -> Any:
    """All projections, experts, embeddings and the head under LoRA."""
    settings = {"r": 4, "target_modules": "all-linear", "use_rslora": True, **options}
    return randomised(get_peft_model(make(), LoraConfig(**settings)), 3, 0.05)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: causal(llama, modules_to_save=["lm_head"]),
    "llama, head and embeddings": lambda: causal(llama, target_modules=["q_proj", "lm_head", "embed_tokens"]),
    "tied": lambda: causal(lambda: llama(tied=True)),
    "moe": lambda: causal(moe),
}


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """As trainers do: decoder layers alone, then the rest with the root."""
    for child in list(model.modules()):
        if type(child).__name__.endswith("DecoderLayer"):
            fully_shard(child, **options)
    fully_shard(model, **options)
    return model


def expected_of(model: Any) -> dict[str, torch.Tensor]:
    """By checkpoint names; tensors by PEFT's own merge of a copy."""
    if isinstance(model.get_base_model(), PreTrainedModel):
        return full_tensors(copy.deepcopy(model).merge_and_unload())
    return merged(model)


def check_syncs(me: Rank, name: str, model: Any, **options: Any) -> bool:
    """Two senders, chunks of 2 KiB, three syncs with other weights. True if all bits are PEFT's, or close to them."""
    reference = copy.deepcopy(model)
    shard(model, **options)
    producer, group = LoRAProducer(model), make_group(me, name)
    plan = plan_of(producer, torch.float32, 2048)
    producer.prepare(plan, [0, 1], group)
    exact = True
    for _ in range(3):
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        found, expected = sync(producer, plan, [0, 1], me.rank), expected_of(reference)
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key], rtol=2e-6, atol=2e-6)
            exact &= torch.equal(tensor, expected[key])
        after = [parameter.to_local() for parameter in model.parameters()]
        assert all(map(torch.equal, before, after))
        with torch.no_grad():
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.mul_(1.0625)
    group.close()
    return exact


def check_zoo(me: Rank, name: str) -> bool:
    return check_syncs(me, name, zoo(name))


def check_dora(me: Rank, name: str) -> bool:
    torch.manual_seed(1)
    model = randomised(get_peft_model(Zoo(), config(use_dora=True, target_modules=["dense", "wide", "image"])), 2)
    return check_syncs(me, name, model)


def check_model(me: Rank, name: str) -> bool:
    return check_syncs(me, name, MODELS[name]())


def check_columns(me: Rank, name: str) -> bool:
    model = causal(lambda: llama(vocabulary=64))
    return check_syncs(me, name, model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0))


def check_turns(me: Rank, name: str) -> bool:
    """Senders that take turns, with tensors of many buckets: no rank merges its part of any of them twice in a sync."""
    model: Any = causal(llama)
    expected = expected_of(copy.deepcopy(model))
    producer, group = LoRAProducer(shard(model) if name == "turns, sharded" else model), make_group(me, name)
    plan = plan_of(producer, torch.float32, 2048).in_turns([1, 0])
    producer.prepare(plan, [0], group)
    assert max(Counter(meta.name for bucket in plan.buckets for meta in bucket.tensors).values()) >= 4
    merges: list[int] = []

    def counted(local: torch.Tensor, *args: Any) -> torch.Tensor:
        merges.append(local.data_ptr())
        return merge(local, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "merge", counted)
        found = sync(producer, plan, plan.turns, me.rank)
        assert 0 < len(merges) == len(set(merges))
        assert not producer._merged
        producer.open()
        digests = producer.digests([spec.name for spec in plan.specs])
        assert len(producer._merged) <= 1, "what is only compared is not kept"
        producer.close()
    group.close()
    assert len(digests) == len(expected)
    everything: list[dict[str, torch.Tensor]] = [{}, {}]
    dist.all_gather_object(everything, found)
    for key, tensor in expected.items():
        spots = [(m, b.sender) for b in plan.buckets for m in b.tensors if m.name == key]
        for meta, sender in spots:
            part = meta.elements.view(everything[sender or 0][key].reshape(-1))
            torch.testing.assert_close(part, meta.elements.view(tensor.reshape(-1)), rtol=2e-6, atol=2e-6)
    return True


def check_alone(me: Rank, name: str) -> bool:
    """The adapter without base weights: shards of A and B put together under the names of PEFT's files."""
    model = causal(llama, modules_to_save=["lm_head"])
    expected = {key: tensor.clone() for key, tensor in get_peft_model_state_dict(model).items()}
    producer, group = AdapterProducer(shard(model)), make_group(me, name)
    plan = plan_of(producer, torch.float32, 2048)
    producer.prepare(plan, [0, 1], group)
    found = sync(producer, plan, [0, 1], me.rank)
    group.close()
    assert {key for key in found if not key.endswith(SCALING)} == set(expected)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    return {float(tensor) for key, tensor in found.items() if key.endswith(SCALING)} == {4.0}


def check_tokens(me: Rank, name: str) -> bool:
    """Through a whole session into an engine of rank 0, three times, after real training steps."""
    model = shard(causal(llama))
    target = llama().eval() if me.rank == 0 else None
    settings = wsync.SyncConfig(bucket_bytes=4096, timeout_s=20.0, verify="digest")
    for step in range(3):
        tokens = torch.randint(0, 60, (2, 8), generator=torch.Generator().manual_seed(step + 10 * me.rank))
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
        model.zero_grad()
        wsync.sync(model, target, config=settings)
        state = {key: t.full_tensor() for key, t in model.state_dict().items() if isinstance(t, DTensor)}
        if target is not None:
            whole = causal(llama).eval()
            whole.load_state_dict(state, strict=False)
            wanted = whole.merge_and_unload().generate(PROMPT, max_new_tokens=8, do_sample=False, pad_token_id=0)
            assert HFEngine(target).generate(PROMPT, max_new_tokens=8) == wanted[:, PROMPT.shape[1] :].tolist()
        dist.barrier()
    return True


def check_refusals(me: Rank, name: str) -> bool:
    """DoRA needs whole rows; and a rank that cannot open stops the others before they gather."""
    whole = MERGEABLE["dora fan in"]()
    with pytest.raises(UnsupportedError, match=r"gpt.weight \[7, 6\] has DoRA.*shard it along dim 1"):
        LoRAProducer(shard(whole)).metadata()
    model = shard(get_peft_model(Zoo(), config()))
    producer, group = LoRAProducer(model), make_group(me, name)
    producer.prepare(plan_of(producer, torch.float32, 2048), [0], group)
    opened = producer.open
    if me.rank:
        layer: Any = model.base_model.model.dense  # type: ignore[union-attr]
        layer.enable_adapters(False)
    with pytest.raises((RankError, UnsupportedError), match=r"adapters of base_model\.model\.dense are"):
        group.local("open", opened, wsync.deadline.Deadline.after(20.0))
    return True


CASES = [
    *(Case(name=name, run=check_zoo, args=(name,)) for name in SHARDED),
    *(Case(name=name, run=check_model, args=(name,)) for name in MODELS),
    Case(name="dora", run=check_dora, args=("dora",)),
    Case(name="columns", run=check_columns, args=("columns",)),
    *(Case(name=name, run=check_turns, args=(name,)) for name in ("turns, whole", "turns, sharded")),
    Case(name="alone", run=check_alone, args=("alone",)),
    Case(name="tokens", run=check_tokens, args=("tokens",)),
    Case(name="refusals", run=check_refusals, args=("refusals",)),
]


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    found: list[dict[str, Outcome]] = run_ranks(run_cases, 2, CASES, timeout_s=240)
    return found


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_two_ranks(outcomes: list[dict[str, Outcome]], name: str) -> None:
    assert [mine[name].error for mine in outcomes] == ["", ""]


def test_linear_layers_are_exact(outcomes: list[dict[str, Outcome]]) -> None:
    """Rows are multiplied as in the whole, but for stacks: the same bits as PEFT's merge in float32."""
    names = ["rslora", "columns", "alone", *(name for name in MODELS if name != "moe")]
    assert {name: outcomes[0][name].result for name in names} == dict.fromkeys(names, True)
