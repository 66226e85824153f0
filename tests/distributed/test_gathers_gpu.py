"""Shards of FSDP2 and ZeRO-3 on several GPUs, gathered over NCCL, into engines of every rank and of one; failures."""

import os
import signal
import tempfile
import time
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

import wsync
from tests.distributed.deepspeed_engines import Kind
from tests.distributed.test_sync_ranks import check_engine, llama
from wsync.adapters.engines.hf import HFEngine
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.deadline import Deadline
from wsync.group import Group
from wsync.testing.ranks import Rank, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

CONFIG = wsync.SyncConfig(bucket_bytes=64 << 10, path="buckets", timeout_s=30.0)
LARGE = 64 << 20


def sharded(me: Rank, seed: int) -> LlamaForCausalLM:
    """On a GPU of this rank's own, in fp32."""
    torch.cuda.set_device(me.rank)
    model = llama(seed).to("cuda")
    mesh = init_device_mesh("cuda", (me.world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@torch.no_grad()
def renew(me: Rank, actor: LlamaForCausalLM, seed: int) -> dict[str, torch.Tensor]:
    """Give the shards the weights of `seed`. Returns all of them, in host memory."""
    full = dict(llama(seed).named_parameters())
    for name, parameter in actor.named_parameters():
        parts = full[name].chunk(me.world_size)
        local = parameter.to_local()
        local.copy_(parts[me.rank] if me.rank < len(parts) else full[name][:0])
    return {name: parameter.detach() for name, parameter in full.items()}


def every_rank_owns_an_engine(me: Rank, dtype: torch.dtype) -> tuple[int, int]:
    """Three syncs; bytes that the device holds after the second and after the third."""
    actor = sharded(me, 1)
    engine = llama(100 + me.rank).to("cuda", dtype)
    held = []
    with wsync.connect(actor, engine, config=CONFIG) as session:
        for seed in (2, 3, 4):
            expected = renew(me, actor, seed)
            session.sync()
            held.append(torch.cuda.memory_allocated())
            for name, parameter in engine.named_parameters():
                assert torch.equal(parameter.cpu(), expected[name].to(dtype)), name
    return held[1], held[2]


def one_rank_owns_an_engine(me: Rank, device: str) -> str:
    """In a process of its own. NCCL cannot write slots in host memory: they are filled from beside the shards."""
    actor = sharded(me, 1)
    with tempfile.TemporaryDirectory() as folder:
        llama(0).save_pretrained(folder)
        engine = HFEngine.launch(folder, device=device, timeout_s=60.0) if me.rank == 0 else None
        try:
            with wsync.connect(actor, engine, config=CONFIG) as session:
                for seed in (2, 3):
                    expected = renew(me, actor, seed)
                    report = session.sync()
                    if engine is not None:
                        check_engine(engine, expected)
                session.release_slots()
                renew(me, actor, 4)
                session.sync()
        finally:
            if engine is not None:
                engine.close()
    return report.transport


def zero3_into_engines_of_every_rank(me: Rank) -> int:
    """DeepSpeed's partitions on GPUs, which it gathers over NCCL itself, in a group of its own."""
    torch.cuda.set_device(me.rank)
    dist.destroy_process_group()
    store = PrefixStore("with nccl", me.store)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=me.rank, world_size=me.world_size)
    os.environ.update(LOCAL_RANK=str(me.rank), RANK=str(me.rank), WORLD_SIZE=str(me.world_size), DS_ACCELERATOR="cuda")
    deepspeed = import_module("deepspeed")
    config = Kind(stage=3).config
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(llama(1).config)
    actor, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config
    )
    engine = llama(100 + me.rank).to("cuda")
    with wsync.connect(actor, engine, config=CONFIG) as session:
        for seed in (2, 3):
            full = dict(llama(seed).named_parameters())
            with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(full[name])
            report = session.sync()
            for name, parameter in engine.named_parameters():
                assert torch.equal(parameter.cpu(), full[name]), name
    return report.tensors


def a_rank_is_killed(me: Rank, syncs: int) -> tuple[str, float, bool]:
    """SIGKILL of rank 1 where rank 0 waits for its shards on the device: what that hears, when, and if it is well."""
    actor = sharded(me, 1)
    engine = llama(100).to("cuda") if me.rank == 0 else None
    with wsync.connect(actor, engine, config=CONFIG) as session:
        for _ in range(syncs):
            session.sync()
        healthy = ShardedProducer.fill

        def fill(self: ShardedProducer, bucket: wsync.Bucket, slot: torch.Tensor | None) -> None:
            if me.rank == 1 and bucket.index == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            healthy(self, bucket, slot)

        ShardedProducer.fill = fill  # type: ignore[method-assign]
        began = time.monotonic()
        with pytest.raises(wsync.WsyncError) as caught:
            session.sync()
        seconds = time.monotonic() - began
    works = float((torch.ones(1 << 20, device="cuda") * 2).sum()) == float(2 << 20)
    return f"{type(caught.value).__name__}: {caught.value}", seconds, works


def a_rank_stops_in_the_middle_of_a_transfer(me: Rank) -> tuple[str, bool]:
    """Rank 1 takes no part in the second exchange: rank 0 gives it up at the deadline and its device is free again."""
    torch.cuda.set_device(me.rank)
    group = Group(me.rank, me.world_size, me.store, 20.0)
    group.enter()
    mine = torch.full((LARGE,), me.rank, device="cuda", dtype=torch.uint8)
    other = 1 - me.rank
    theirs = torch.empty_like(mine)
    group.transfer([(other, mine)], [(other, theirs)], Deadline.after(20))
    group.settle(Deadline.after(20))
    assert bool((theirs == other).all())
    words = ""
    if me.rank == 0:
        group.transfer([(other, mine)], [(other, theirs)], Deadline.after(5))
        with pytest.raises(wsync.SyncTimeout) as caught:
            group.settle(Deadline.after(2))
        words = str(caught.value)
    group.reset()
    torch.cuda.synchronize()
    group.enter()
    group.round("again", None, Deadline.after(20))
    group.transfer([(other, mine)], [(other, theirs)], Deadline.after(20))
    group.settle(Deadline.after(20))
    return words, bool((theirs == other).all())


def both_on_one_device(me: Rank) -> str:
    torch.cuda.set_device(0)
    group = Group(me.rank, me.world_size, me.store, 20.0)
    group.enter()
    tensor = torch.ones(8, device="cuda")
    with pytest.raises(wsync.ConfigError) as caught:
        group.transfer([(1 - me.rank, tensor)], [(1 - me.rank, tensor.clone())], Deadline.after(20))
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_engine_on_every_rank(dtype: torch.dtype) -> None:
    for second, third in run_ranks(every_rank_owns_an_engine, 2, dtype, timeout_s=120):
        assert second == third


def test_zero3_partitions_on_gpus() -> None:
    pytest.importorskip("deepspeed")
    first, second = run_ranks(zero3_into_engines_of_every_rank, 2, timeout_s=180)
    assert first == second > 20


@pytest.mark.parametrize(("device", "transport"), [("cuda:0", "cuda_ipc"), ("cpu", "shm")])
def test_an_engine_on_one_rank(device: str, transport: str) -> None:
    assert run_ranks(one_rank_owns_an_engine, 2, device, timeout_s=180)[0] == transport


@pytest.mark.parametrize("syncs", [0, 1])
def test_a_killed_rank_is_an_error_at_once_and_the_device_goes_on(syncs: int) -> None:
    words, seconds, works = run_ranks(a_rank_is_killed, 2, syncs, timeout_s=120, expected_dead=[1])[0]
    assert words.startswith("RankError")
    assert "[1]" in words
    assert seconds < CONFIG.timeout_s / 2
    assert works


def test_a_rank_that_takes_no_part_is_given_up_and_the_next_transfer_works() -> None:
    (words, first), (_, second) = run_ranks(a_rank_stops_in_the_middle_of_a_transfer, 2, timeout_s=120)
    assert "exchange their shards over NCCL" in words
    assert first
    assert second


def test_two_ranks_on_one_device_are_refused() -> None:
    for words in run_ranks(both_on_one_device, 2, timeout_s=60):
        assert "have their shards on one device" in words
