"""What the tests of strategies have two ranks do."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import wsync
from integrations.ppo import models, toy
from integrations.ppo.engines.base import SamplingParams
from integrations.ppo.prompts import from_toy
from integrations.ppo.sequence_parallel import ATTENTION, SequenceParallel
from integrations.ppo.shards import shards
from integrations.ppo.strategy import get_strategy
from integrations.ppo.strategy.base import Strategy
from integrations.ppo.train import close, shared_folder
from tests.ppo.rank_steps import Facts, arguments
from wsync.testing.launched import as_under_torchrun
from wsync.testing.ranks import Rank

TOKENS = torch.arange(3, 11)[None]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, seed=0, stop_token_id=None)


def words_of(call: Callable[[], Any]) -> str:
    """What a call says that must fail."""
    try:
        call()
    except (ValueError, wsync.WsyncError) as error:
        return str(error)
    return "nothing"


def made(me: Rank, options: str) -> Strategy:
    """A strategy with an actor and a critic, which have no engine yet."""
    as_under_torchrun(me)
    strategy = get_strategy(arguments(options))
    strategy.prepare("actor", models.policy(strategy.args), 1e-2)
    strategy.prepare("critic", models.critic(strategy.args), 1e-2)
    return strategy


def checkpoint(strategy: Strategy, folder: Path) -> Path:
    """*Collective.* What engines start from."""
    if strategy.is_rank_0:
        models.policy(strategy.args).save_pretrained(folder)
    dist.barrier()
    return folder


def numbers_over_ranks(me: Rank, options: str) -> Facts:
    """What collectives say when rank r passes r + 1, which part of the data this rank has, and who prints."""
    as_under_torchrun(me)
    strategy = get_strategy(arguments(options))
    given = torch.tensor([me.rank + 1.0, 4.0])
    facts: Facts = {"type": type(strategy).__name__, "rank 0": strategy.is_rank_0}
    for op in ("mean", "sum", "max"):
        facts[op] = (
            strategy.all_reduce(given, op).tolist(),
            strategy.all_reduce(me.rank + 1, op),
            strategy.all_reduce({"b": me.rank + 1.0, "a": 4.0}, op),
        )
    facts["given"] = given.tolist()
    facts["min"] = words_of(lambda: strategy.all_reduce(given, "min"))  # type: ignore[arg-type]
    facts["gathered"] = strategy.all_gather({"rank": me.rank})
    facts["data"] = [
        [[prompt.text for prompt in batch] for batch in strategy.setup_dataloader(from_toy(13, 0), 2, shuffle=shuffle)]
        for shuffle in (False, True)
    ]
    with redirect_stdout(io.StringIO()) as printed:
        strategy.print("words", 1)
    return {**facts, "printed": printed.getvalue(), "memory": strategy.report_memory("here")}


def accumulated(me: Rank, options: str) -> list[tuple[str, bool, list[bool]]]:
    """Of each micro-batch of two steps: whose, whether there was a norm, and which models have moved so far."""
    strategy = made(me, f"{options} --micro_train_batch_size 8")
    roles = list(strategy.roles.values())
    before = [[shard.clone() for shard in shards(role.model)] for role in roles]
    found = []
    for _ in range(2 * strategy.micro_batches):
        for role in roles:
            loss = role.model(input_ids=TOKENS + me.rank).logits.square().mean()
            strategy.backward(loss, role.model, role.optimizer)
            norm = strategy.optimizer_step(role.optimizer, role.model, role.scheduler)
            now = [shards(one.model) for one in roles]
            moved = [not all(map(_same_bits, *pair)) for pair in zip(before, now, strict=True)]
            found.append((role.name, norm is not None and norm > 0, moved))
    return found


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """What fills up a rank's part of a small tensor may be anything, NaN too."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def clipped_alone(me: Rank) -> tuple[float, float, float]:
    """Both models have gradients. Norms: the critic's before and after the actor's step, and the actor's."""
    strategy = made(me, "--fsdp --max_norm 0.001")
    actor, critic = strategy.roles["actor"], strategy.roles["critic"]
    for role in (actor, critic):
        strategy.backward(role.model(input_ids=TOKENS).logits.square().mean(), role.model, role.optimizer)
    before = _norm(critic.model)
    of_actor = strategy.optimizer_step(actor.optimizer, actor.model, actor.scheduler, name="actor")
    assert of_actor is not None
    return before, _norm(critic.model), of_actor


def _norm(model: torch.nn.Module) -> float:
    """Of this rank's gradients."""
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    return float(torch.stack([grad.norm() for grad in local]).norm())


def optimizers_unpaired(me: Rank, options: str) -> list[list[str] | str]:
    """Which optimizers have their states on the device after calls that have no partner, then what wrong calls say."""
    with shared_folder() as folder:
        strategy = made(me, f"{options} --adam_offload")
        actor, critic = (role.optimizer for role in strategy.roles.values())
        strategy.setup_inference_engine(
            strategy.args, "hf", strategy.roles["actor"].model, checkpoint(strategy, folder)
        )
        memory = strategy.memory
        assert memory is not None
        found: list[list[str] | str] = []
        for call in (
            strategy.maybe_offload_optimizer,
            strategy.maybe_load_optimizer,
            strategy.maybe_load_optimizer,
            strategy.maybe_offload_optimizer,
            strategy.maybe_offload_optimizer,
        ):
            call(critic)
            found.append([name for name in sorted(memory.present) if "optimizer" in name])
        strategy.maybe_load_optimizer(actor, strategy.device)
        found.append(words_of(lambda: strategy.maybe_load_optimizer(actor, torch.device("meta"))))
        found.append(words_of(lambda: strategy.maybe_load_optimizer(torch.optim.SGD([torch.zeros(1)]))))
        close(strategy)
    return found


def reloaded(me: Rank, options: str) -> list[list[str] | str]:
    """Who is there with the reference, after another frozen model was asked for, when the reference has left, ..."""
    with shared_folder() as folder:
        strategy = made(me, f"{options} --offload_models")
        actor, critic = (role.model for role in strategy.roles.values())
        reference, other = (
            strategy.freeze(name, models.policy(strategy.args)).model for name in ("reference", "other")
        )
        strategy.setup_inference_engine(strategy.args, "hf", actor, checkpoint(strategy, folder))
        memory = strategy.memory
        assert memory is not None
        found: list[list[str] | str] = []

        def note() -> None:
            found.append([name for name in sorted(memory.present) if "optimizer" not in name])

        for _ in range(2):
            strategy.reload_model([actor, critic, reference])
        note()
        found.append(words_of(lambda: strategy.reload_model(other)))
        strategy.offload_model(other)
        note()
        for _ in range(2):
            strategy.offload_model([actor, reference])
        note()
        strategy.reload_model(other)
        note()
        found.append(words_of(lambda: strategy.reload_model(torch.nn.Linear(1, 1))))
        strategy.offload_model(other)
        close(strategy)
    return found


def set_up(me: Rank, sharding: str) -> Facts:
    """First answers of engines that were set up with an actor, whose weights are not the checkpoint's, and without."""
    with shared_folder() as folder:
        facts: Facts = {}
        for name in ("with", "without"):
            strategy = made(me, f"{sharding} --engine_type vllm")
            actor = strategy.roles["actor"].model
            for shard in shards(actor):
                shard.neg_()
            given = actor if name == "with" else None
            engine = strategy.setup_inference_engine(strategy.args, "hf", given, checkpoint(strategy, folder))
            facts[f"{name} an actor: engine"] = (type(engine).__name__, engine is strategy.inference_engine)
            facts[f"{name} an actor: status"] = strategy.inference_engine_status.name
            for when in ("first", "synced"):
                (said,) = strategy.gather_and_generate(GREEDY, [[50, 60, 70]], sleep_engine=False)
                facts[f"{name} an actor: {when}"] = said.output_token_ids
                strategy.update_engine_weights(actor)
            close(strategy)
        facts["late"] = words_of(lambda: strategy.freeze("late", models.policy(strategy.args)))
    return facts


def not_set_up(me: Rank) -> list[str]:
    """What engines say that have nothing to start from, nothing to wake with, another kind's arguments, or no kind."""
    strategy = made(me, "--fsdp --engine_sleep_level 2")
    args, folder = strategy.args, Path("checkpoint")
    with_vllms = arguments("--fsdp --engine_args {}")
    return [
        words_of(lambda: strategy.setup_inference_engine(args, "hf", strategy.roles["actor"].model)),
        words_of(lambda: strategy.setup_inference_engine(args, "hf", None, folder)),
        words_of(lambda: strategy.setup_inference_engine(with_vllms, "hf", strategy.roles["actor"].model, folder)),
        words_of(lambda: strategy.setup_inference_engine(args, "x", args, folder)),  # type: ignore[arg-type]
    ]


def sharded(me: Rank) -> Facts:
    """Meshes, modes and policies of models that one strategy shards, and what DeepSpeed's says of one that trains."""
    strategy = get_strategy(arguments("--fsdp --fsdp_cpu_offload --initial_model_shard_size 1"))
    found: Facts = {}
    for is_training in (False, True):
        for shard_size in (-1, 1, 2):
            model = strategy.prepare_model(models.policy(strategy.args), is_training, shard_size)
            group = model._get_fsdp_state()._fsdp_param_group
            policy = type(group.offload_policy).__name__
            found[f"{is_training} {shard_size}"] = (tuple(group.mesh_info.mesh.shape), policy, model.training)
    found["3"] = words_of(lambda: strategy.prepare_model(models.policy(strategy.args), shard_size=3))
    deepspeed = get_strategy(arguments("--zero_stage 3"))
    found["deepspeed"] = words_of(lambda: deepspeed.prepare_model(models.policy(strategy.args), is_training=True))
    return found


def attending(me: Rank) -> list[str | bool]:
    """Whether attention over slices is the model's own with a window that is wide enough; what it says of others."""
    from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig

    SequenceParallel(1)
    small = toy.config(32).to_dict() | {"head_dim": 32}
    del small["model_type"], small["architectures"]
    wide, narrow = (MistralConfig(**small | {"sliding_window": window}) for window in (8, 4))
    own, sliced, windowed, capped = (
        AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for config, attention in (
            (wide, "sdpa"),
            (wide, ATTENTION),
            (narrow, ATTENTION),
            (Gemma2Config(**small), ATTENTION),
        )
    )
    sliced.load_state_dict(own.state_dict())
    same = torch.allclose(sliced(input_ids=TOKENS).logits, own(input_ids=TOKENS).logits, atol=1e-5)
    return [same, *(words_of(partial(model, input_ids=TOKENS)) for model in (windowed, capped))]
