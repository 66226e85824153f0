"""The PPO trainer with real vLLM on one device: is memory flat, and what share of an iteration is the sync?

    python -m benchmarks.ppo_run --out FOLDER [--steps 20] [--graphs] [-- MORE OPTIONS OF THE TRAINER]

A model of the shape of Qwen2-1.5B, 64 prompts with two answers of 512 tokens each. `--small` tries it on a CPU: there
nothing is checked but that it runs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.ppo_facts import PPOFacts
from benchmarks.ppo_models import make_checkpoint
from wsync.bench.gpu.outcome import Outcome
from wsync.bench.machine import hardware, versions
from wsync.memory.timeline import plot_rows
from wsync.testing.processes import end

ROOT = Path(__file__).resolve().parents[1]
FLAT_BYTES = 32 << 20
MOST_SHARE = 0.02
SHOWN = 3
"""Iterations in the closer picture."""

OPTIONS = """
    --fsdp --bf16 --use_mp_opt --engine_type vllm --engine_sleep_level 2 --offload_models --adam_offload
    --advantage_estimator group_norm --n_samples_per_prompt 2 --fused_linear_logprob
    --reward benchmarks.ppo_models:even_fraction --actor_learning_rate 1e-6 --timeout_s 300 --plot_every 5
"""
SIZES = """
    --rollout_batch_size 64 --train_batch_size 128 --micro_train_batch_size 32 --micro_rollout_batch_size 64
    --generate_max_len 512 --engine_mem_util 0.2
"""
SMALL_SIZES = """
    --rollout_batch_size 4 --train_batch_size 8 --micro_train_batch_size 4 --micro_rollout_batch_size 4
    --generate_max_len 8
"""


def main(argv: Sequence[str]) -> int:
    """Returns 0 if all checks hold."""
    options = _parser().parse_args(argv)
    deadline = time.monotonic() + options.timeout_s
    log_dir: Path = options.out / "log"
    log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="wsync-ppo-run-") as folder:
        checkpoint = Path(folder)
        make_checkpoint(checkpoint, small=options.small, timeout_s=options.timeout_s)
        trainer = _options(options, checkpoint, log_dir)
        code = _train(trainer, options.out / "train.txt", deadline - time.monotonic())
    facts = PPOFacts(log_dir)
    if not facts.iterations:
        print(f"no iteration ended ({code}):\n{_tail(options.out / 'train.txt')}")
        return 1
    outcome = _judge(facts, options, code, trainer)
    _draw(facts, options.out)
    path = _write(outcome, options.out)
    if code != "0":
        print(f"the trainer ended with {code}:\n{_tail(options.out / 'train.txt')}\n")
    print(facts.table())
    for check, right in outcome.checks.items():
        print(f"{'ok' if right else 'WRONG':<6}{check}")
    print(f"written to {path}")
    return 0 if outcome.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ppo_run", description="The PPO trainer on one device.")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for results, pictures and the trainer's --log_dir")
    add("--steps", type=int, default=20, help="iterations")
    add("--small", action="store_true", help="a tiny model, for a CPU; only whether it runs is checked")
    add("--graphs", action="store_true", help="let vLLM compile and capture graphs; it starts later and answers faster")
    add("--timeout-s", type=float, default=540.0, help="what runs then is ended, and what is known by then is told")
    add(
        "options",
        nargs="*",
        metavar="OPTION",
        help="after --: options of the trainer, in place of those of this script",
    )
    return parser


def _options(options: argparse.Namespace, checkpoint: Path, log_dir: Path) -> list[str]:
    """Of the trainer. The last one of a name counts."""
    found = [*OPTIONS.split(), *(SMALL_SIZES if options.small else SIZES).split()]
    engine: dict[str, object] = {"enforce_eager": not options.graphs}
    if torch.cuda.is_available():
        engine["attention_backend"] = "TRITON_ATTN"  # the one that every build of vLLM has
    found += ["--engine_args", json.dumps(engine)]
    found += ["--pretrain", str(checkpoint), "--log_dir", str(log_dir), "--steps", str(options.steps)]
    return [*found, *options.options]


def _train(options: Sequence[str], log: Path, timeout_s: float) -> str:
    """What the trainer ended with, under torchrun as one rank."""
    settings = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if not torch.cuda.is_available():
        settings |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [sys.executable, *launcher, "-m", "integrations.ppo.train", *options]
    with log.open("wb") as words:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **settings},
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return str(process.wait(max(timeout_s, 0.0)))
        except subprocess.TimeoutExpired:
            return "nothing: its time was over"
        finally:
            end(process)


def _judge(facts: PPOFacts, options: argparse.Namespace, code: str, trainer: Sequence[str]) -> Outcome:
    outcome = Outcome(case="ppo-small" if options.small else "ppo-1.5b")
    outcome.checks[f"{options.steps} iterations, and the trainer ended well"] = (
        len(facts.iterations) == options.steps and code == "0"
    )
    share, growth = facts.median("sync_share"), facts.growth
    if not options.small:
        several = min(map(len, facts.peaks.values()), default=0) > 2
        outcome.checks[f"every phase's peak is flat from the second iteration on, to {FLAT_BYTES >> 20} MiB"] = (
            several and growth <= FLAT_BYTES
        )
        outcome.checks[f"the sync takes under {MOST_SHARE:.0%} of an iteration (median)"] = share < MOST_SHARE
    outcome.facts |= {
        "options": list(trainer),
        "median share of the sync": share,
        "share of the sync": [line["sync_share"] for line in facts.iterations],
        "peak bytes of the device": dict(facts.peaks),
        "growth from the second iteration on, bytes": growth,
        "iterations": facts.iterations,
        "peaks of the ledger": facts.ledger.get("peaks"),
        "moves": facts.ledger.get("moves"),
    }
    return outcome


def _draw(facts: PPOFacts, out: Path) -> None:
    """All of it, and a few iterations closer."""
    if facts.rows_by_iteration:
        plot_rows(facts.ledger["entries"], out / "ppo_memory.svg")
        plot_rows([row for rows in facts.rows_by_iteration[-SHOWN:] for row in rows], out / "ppo_iterations.svg")


def _write(outcome: Outcome, out: Path) -> Path:
    """As `python -m wsync.bench --json` does, under the name that it has in benchmarks/results."""
    machine, now = hardware(), datetime.now(timezone.utc)
    gpus = machine["gpus"]
    assert isinstance(gpus, list)
    name = gpus[0].split()[-1].lower() if gpus else f"cpu-{machine['cores']}c"
    content = {
        "time": now.isoformat(timespec="seconds"),
        "hardware": machine,
        "versions": {**versions(), "transformers": version("transformers"), "vllm": _vllm_version()},
        "rows": [outcome.as_json()],
    }
    path = out / f"ppo_{name}_{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _vllm_version() -> str:
    """As the package itself has it, which may be there without metadata. It is not imported: that takes long."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    words = (Path(spec.origin).parent / "_version.py").read_text()
    found = re.search(r"""^__version__\b.*["'](.+)["']""", words, re.MULTILINE)
    return found[1] if found else "unknown"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
