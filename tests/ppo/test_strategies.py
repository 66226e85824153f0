"""Every way to shard trains in the same way, and neither micro-batches, packing nor chunks matter."""

import pytest

from tests.ppo.rank_steps import numbers
from tests.ppo.strategy_steps import attending
from wsync.testing.ranks import run_ranks

CHUNKS = "--fused_linear_logprob --chunk_size 7"
LEAN = f"--packing_samples {CHUNKS}"

SAME = (
    "--fsdp",
    "--zero_stage 1",
    "--zero_stage 2",
    "--zero_stage 3",
    "--fsdp --micro_train_batch_size 4",
    f"--fsdp {LEAN}",
    "--fsdp --fsdp_cpu_offload",
    "--fsdp --initial_model_shard_size 1 --micro_rollout_batch_size 8",
    f"--zero_stage 3 {LEAN}",
)
OTHER = (
    "--fsdp --loss_agg_mode seq-mean-token-mean",
    "--fsdp --entropy_coef 10",
    "--fsdp --gamma 0.5",
    "--fsdp --whiten_advantages",
)
COMPARED = ("reward", "kl", "policy_loss", "value_loss", "actor_grad_norm", "critic_grad_norm", "clip_fraction")


@pytest.mark.slow
def test_all_agree() -> None:
    """Two iterations, of two epochs of two optimizer steps each: only rounding differs."""
    runs = [f"--engine_type hf --steps 2 {options}" for options in (*SAME, *OTHER)]
    found = run_ranks(numbers, 2, runs, timeout_s=300)[0]
    for options, lines in zip(SAME, found, strict=False):
        for line, first in zip(lines, found[0], strict=True):
            for name in COMPARED:
                assert line[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6), (options, name)
    for options, lines in zip(OTHER, found[len(SAME) :], strict=True):
        assert lines[0]["actor_grad_norm"] != pytest.approx(found[0][0]["actor_grad_norm"], rel=1e-3), options


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("more", ["--lora_rank 4", "--lr_scheduler linear --lr_warmup_steps 3"])
def test_all_agree_on_adapters_and_on_rates(more: str) -> None:
    """Whoever merges what is sent, and whoever counts the steps of a scheduler."""
    shardings = ("--fsdp", "--zero_stage 1 --offload_models --adam_offload", "--zero_stage 2", "--zero_stage 3")
    run = "--engine_type hf --steps 3"
    runs = [*(f"{run} {sharding} {more}" for sharding in shardings), f"{run} --fsdp"]
    *found, plain = run_ranks(numbers, 2, runs, timeout_s=300)[0]
    for sharding, lines in zip(shardings, found, strict=True):
        assert max(line["engine_gap"] for line in lines) < 1e-5
        for line, first in zip(lines, found[0], strict=True):
            for name in COMPARED:
                assert line[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6), (sharding, name)
    assert found[0][1]["kl"] != pytest.approx(plain[1]["kl"], rel=1e-2), "the options do nothing"


@pytest.mark.slow
def test_slices_of_sequences() -> None:
    """One optimizer step over all sequences, so that it does not matter which rank has which of them first."""
    runs = [
        f"--engine_type hf --steps 2 --max_epochs 1 --train_batch_size 64 {options}"
        for options in (
            "--fsdp",
            "--fsdp --sp_size 2",
            "--zero_stage 3 --sp_size 2 --fused_linear_logprob --chunk_size 7",
        )
    ]
    found = run_ranks(numbers, 2, runs, timeout_s=300)[0]
    for options, lines in zip(runs, found, strict=True):
        for line, first in zip(lines, found[0], strict=True):
            for name in COMPARED:
                assert line[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6), (options, name)


@pytest.mark.slow
def test_slices_of_what_does_not_attend_to_everything() -> None:
    """Instead of wrong numbers."""
    same, windowed, capped = run_ranks(attending, 1, timeout_s=60)[0]
    assert same
    assert "this model has a window" in windowed
    assert "this model has a cap" in capped
