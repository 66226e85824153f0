"""The main job, small: train a sharded model, sync it into an engine in another process, prove the result.

    torchrun --standalone --nproc-per-node 2 -m examples.demo --engine hf      (or: make demo ENGINE=hf|vllm|sglang)

A tiny Llama under FSDP2 takes a few optimizer steps on all ranks. Rank 0 owns the engine, started on the weights from
before. After `wsync.sync` every tensor in the engine must equal the trainer's bit for bit, and the engine's greedy
tokens must equal those of a transformers model that was given the new weights by hand.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import wsync
from examples.demo_engines import DemoEngine, start_engine

PROMPTS = [[7, 11, 13, 17], [101, 103, 107, 109, 113], [251, 3, 251, 3, 251, 3]]
NEW_TOKENS = 16


def main() -> None:
    """Run the demo on this rank and exit; with 0 only if every proof holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engine", choices=("hf", "vllm", "sglang"), default="hf", help="which engine generates (default: hf)"
    )
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps before the sync (default: 4)")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        with tempfile.TemporaryDirectory(prefix="wsync-demo-") as folder:
            ok = run(options.engine, options.steps, Path(folder))
        if dist.get_rank() == 0:  # after all that engines say as they end
            say("demo: ok" if ok else "demo: FAILED")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    leave(0 if ok else 1)


def run(engine_name: str, steps: int, folder: Path) -> bool:
    """Train, sync, compare. Returns True on every rank if all proofs hold."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    actor = LlamaForCausalLM(tiny_llama())
    engine: DemoEngine | None = None
    if rank == 0:
        actor.save_pretrained(folder)
        say(f"starting the {engine_name} engine on the untrained weights")
        engine = start_engine(engine_name, folder)
    try:
        for layer in actor.model.layers:
            fully_shard(layer)
        fully_shard(actor)
        before = engine.generate(PROMPTS, NEW_TOKENS) if engine else []
        train(actor, steps)
        report = wsync.sync(actor, engine.handle if engine else None, config=wsync.SyncConfig(verify="digest"))
        everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
        expected = cast("dict[str, torch.Tensor]", get_model_state_dict(actor, options=everything))
        ok = engine is None or prove(engine, before, expected, report)
    finally:
        if engine is not None:
            engine.close()
    verdict = torch.tensor(int(ok))
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict.item())


def tiny_llama() -> LlamaConfig:
    """A Llama small enough for a laptop, with heads that every engine takes."""
    return LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def train(actor: torch.nn.Module, steps: int) -> None:
    """A few steps of next-token prediction on random tokens: enough to move every weight."""
    optimizer = torch.optim.AdamW(actor.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        tokens = torch.randint(1, 512, (4, 32), generator=generator)
        loss = actor(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            say(f"step {step + 1}/{steps}: loss {loss.item():.3f}")


def prove(
    engine: DemoEngine, before: list[list[int]], expected: dict[str, torch.Tensor], report: wsync.SyncReport
) -> bool:
    """Compare the engine with transformers: every tensor bit for bit, then greedy tokens."""
    say(str(report))
    wrong = [name for name, resident, sent in engine.tensors(expected) if not torch.equal(resident, sent)]
    say(f"bit-equal tensors: {'all' if not wrong else 'NOT ' + ', '.join(wrong)}")
    reference = LlamaForCausalLM(tiny_llama())
    reference.load_state_dict(expected)
    wanted = greedy(reference)
    after = engine.generate(PROMPTS, NEW_TOKENS)
    say(f"first prompt before the sync: {before[0]}")
    say(f"first prompt after the sync:  {after[0]}")
    say(f"transformers, new weights:    {wanted[0]}")
    if after != wanted:
        say("the engine's tokens differ from transformers'")
    if before == after:
        say("the sync changed no token: the demo proves nothing")
    return not wrong and after == wanted and before != after


@torch.no_grad()
def greedy(model: LlamaForCausalLM) -> list[list[int]]:
    """Greedy tokens after each prompt, one prompt at a time, straight from transformers."""
    model.eval()
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def leave(status: int) -> NoReturn:
    """Exit without the interpreter's own clean-up, in which a rank that used gloo may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def say(text: str) -> None:
    """One line, at once: the output of several processes is interleaved."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
