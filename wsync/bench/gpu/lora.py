"""LoRA on a GPU: merged weights of an actor under PEFT, and its adapter alone.

Adapters are on all linear layers of attention and MLP. Their last MLP decides the token, so that with another adapter
the model says something else, by far.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wsync
from wsync.adapters.engines.vllm_lora import lora_request
from wsync.bench.gpu import engines, models
from wsync.bench.gpu.checks import check_tokens, free, in_place, load_directly, outcome_of
from wsync.bench.gpu.outcome import COPY, Limit, Outcome, copies, in_turn
from wsync.bench.samples import Way
from wsync.session import Session

RANK = 16
_SCALING = 2
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTER = "default"
_STEEP, _PUSH = 4.0, 0.01
# Bytes read and written for each element: base 2, sum 4, cast 4 + 2, load 2 + 2. A copy has 4.
_PASSES = 5.0
_ULP, _SMALL = 2.0**-7, 1e-6

MERGES = "merges alone"


def merged(name: str, rounds: int) -> Outcome:
    """The merged weights of a dense 7B into a vLLM of this process, in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        config = models.config_of(models.DENSE, torch.bfloat16)
        engine = engines.start_vllm(models.make_folder(config, Path(folder)), "bfloat16")
        base = models.make_actor(config, torch.bfloat16, 1)
        outcome = outcome_of(name, base, torch.bfloat16, (Limit(reference=COPY, factor=_PASSES),))
        actor = tuned(base)
        [model] = engine.collective_rpc("get_model")
        before = {key: tensor.clone() for key, tensor in _base_weights(actor)}
        with in_place(outcome, engine), wsync.connect(actor, engine) as session:
            references = {COPY: copies(outcome.nbytes, 1), MERGES: _merges(actor)}
            outcome.samples = in_turn(session.sync, references, rounds)
            outcome.facts["stages of the last sync, s"] = dict(session.sync().stages)
            del references
            _check_memory(outcome, session)
            check_tokens(outcome, session, actor, engine, randomize=randomize)
        outcome.checks["base weights of the actor have their bits"] = _same_bits(before, dict(_base_weights(actor)))
        del before
        free()
        _check_sums(outcome, actor, engine, model)
    return outcome


def alone(name: str) -> Outcome:
    """An adapter into a small vLLM of this process that has the actor's base weights from its files."""
    with tempfile.TemporaryDirectory() as folder:
        base, engine = _small(Path(folder))
        actor = tuned(base)
        factors = [tensor for key, tensor in actor.named_parameters() if ".lora_" in key]
        nbytes = sum(factor.numel() for factor in factors) * torch.bfloat16.itemsize
        outcome = Outcome(case=name, tensors=len(factors), nbytes=nbytes)
        config = wsync.SyncConfig(lora="adapter")
        with in_place(outcome, engine), wsync.connect(actor, engine, config=config) as session:
            check_tokens(outcome, session, actor, engine, randomize=randomize, request=lora_request())
        with actor.disable_adapter():
            expected = models.greedy(actor, engines.prompts(), engines.NEW_TOKENS)
        outcome.checks["tokens without the adapter"] = engines.answers_of(engine) == expected
    return outcome


def both(name: str) -> Outcome:
    """Merged weights into an engine that was started for adapters."""
    with tempfile.TemporaryDirectory() as folder:
        base, engine = _small(Path(folder))
        outcome = outcome_of(name, base, torch.bfloat16, ())
        actor = tuned(base)
        with in_place(outcome, engine), wsync.connect(actor, engine) as session:
            check_tokens(outcome, session, actor, engine, randomize=randomize)
    return outcome


def tuned(model: nn.Module) -> Any:
    """`model` under PEFT, its adapter by `randomize`."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=RANK, lora_alpha=_SCALING * RANK, target_modules=list(_LINEAR), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    actor = get_peft_model(model, settings).eval()
    randomize(actor, 1)
    return actor


@torch.no_grad()
def randomize(actor: Any, seed: int) -> None:
    """A new adapter in place. With it every prompt is answered with one token, another one for every seed.

    In the last MLP gate and up compute the same `RANK` functions of the input, each with both signs. The sum of their
    products is that of squares, positive whatever the input is, and down adds it along the embedding of one token.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    for name, factor in actor.named_parameters():
        if ".lora_A." in name:
            factor.normal_(0, factor.shape[1] ** -0.5, generator=generator)
        elif ".lora_B." in name:
            factor.normal_(0, 0.005 if "o_proj" in name or "down_proj" in name else 0.05, generator=generator)
    model = actor.get_base_model()
    mlp, embedding = model.model.layers[-1].mlp, model.get_input_embeddings().weight
    (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = map(_factors, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    up_a.copy_(gate_a)
    functions = torch.eye(RANK, device=gate_b.device)
    signed = torch.cat([functions, -functions])
    for b in (gate_b, up_b):
        b[: 2 * RANK] = _STEEP * signed
    down_a.zero_()
    down_a[0, : 2 * RANK] = 1
    token = int(torch.randint(len(embedding), (1,), generator=generator, device=embedding.device))
    down_b.zero_()
    down_b[:, 0] = _PUSH * embedding[token]


def _small(folder: Path) -> tuple[nn.Module, Any]:
    """A small actor in bf16, as vLLM's kernels for adapters want it, and a vLLM that starts with its weights."""
    config = models.config_of(models.DENSE, torch.bfloat16, small=True)
    base: Any = models.make_actor(config, torch.bfloat16, 1)
    base.save_pretrained(folder)
    return base, engines.start_vllm(folder, "bfloat16", dummy=False, adapters_of_rank=RANK)


def _check_memory(outcome: Outcome, session: Session) -> None:
    """Ten syncs must leave the allocator with what it had."""
    free()
    for _ in range(3):
        session.sync()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(10):
        session.sync()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    outcome.facts["device bytes allocated and reserved, before and after 10 syncs"] = [before, after]
    outcome.facts["device bytes that a sync takes and gives back"] = torch.cuda.max_memory_allocated() - before[0]
    outcome.checks["10 syncs hold no more device memory"] = before == after


def _check_sums(outcome: Outcome, actor: Any, engine: Any, model: Any) -> None:
    """What the engine has is what PEFT's layers add up to, within one rounding."""
    got = {key: tensor.clone() for key, tensor in model.named_parameters()}
    load_directly(engine, model, _sums(actor))
    other, odd = 0, 0
    for key, tensor in model.named_parameters():
        difference = (got[key].float() - tensor.float()).abs()
        other += int((difference > 0).sum())
        odd += int((difference > _ULP * tensor.float().abs() + _SMALL).sum())
    outcome.facts["elements that are rounded otherwise"] = other
    outcome.checks["weights are W + scaling * B @ A"] = odd == 0


def _merges(actor: Any) -> Way:
    """What wsync's kernel has to do for a sync, into one piece of memory in float32."""
    from wsync.adapters.trainers.lora_kernel import add_product

    layers = [layer for layer in actor.get_base_model().modules() if hasattr(layer, "lora_A")]
    parts = [(layer.base_layer.weight.detach(), *(factor.detach() for factor in _factors(layer))) for layer in layers]
    room = torch.empty(max(base.numel() for base, _, _ in parts), device="cuda")

    def run() -> None:
        for base, a, b in parts:
            add_product(base, b, a, _SCALING, room[: base.numel()].view(base.shape))

    return run


@torch.no_grad()
def _sums(actor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Merged weights, computed here, by the names of the model inside."""
    model = actor.get_base_model()
    for name, weight in _base_weights(actor):
        layer = model.get_submodule(name.rpartition(".")[0])
        if name.endswith(".weight") and hasattr(layer, "lora_A"):
            a, b = _factors(layer)
            yield name, (weight.float() + _SCALING * (b.float() @ a.float())).to(weight.dtype)
        else:
            yield name, weight


def _base_weights(actor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in actor.get_base_model().named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter.detach()


def _factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight


def _same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor.view(torch.uint8), other[key].view(torch.uint8)) for key, tensor in one.items()
    )
