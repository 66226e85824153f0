"""Checkpoints: whole or not there, and a run that goes on from one is bit for bit the run that never ended."""

import os
import random
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from integrations.ppo.arguments import Arguments
from integrations.ppo.errors import ConflictError
from integrations.ppo.strategy.base import Strategy

MAY_CHANGE = (
    "eval_before_train",
    "eval_every",
    "save_every",
    "ckpt_dir",
    "log_dir",
    "plot_every",
    "eval_data",
    "save_path",
    "timeout_s",
)
"""Options that do not change what a step does. Nor does the number of steps, unless a scheduler counts them."""

COUNTLESS = ("constant", "constant_with_warmup")


class Stateful(Protocol):
    """What one rank knows beside models and optimizers, in plain data."""

    step: int

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """Folders `step_000012` in `--ckpt_dir`. Every method is collective."""

    def __init__(self, args: Arguments, strategy: Strategy) -> None:
        self._args, self._strategy = args, strategy
        self._root = Path(args.ckpt_dir)

    def save(self, trainer: Stateful) -> None:
        """Write one, under another name until all of it is there."""
        final = self._root / f"step_{trainer.step:06d}"
        scratch = final.with_suffix(".partial")
        if self._strategy.is_rank_0:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        dist.barrier()
        self._strategy.enter("train")
        self._strategy.save_ckpt(scratch)
        state = {
            "trainer": trainer.state_dict(),
            "random": random_states(),
            "arguments": asdict(self._args),
            "world_size": self._strategy.world_size,
        }
        torch.save(state, scratch / f"rank_{self._strategy.rank}.pt")
        dist.barrier()
        if self._strategy.is_rank_0:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(scratch, final)
        dist.barrier()

    def load(self, trainer: Stateful) -> bool:
        """Go on from the newest one; False if there is none.

        Raises `ConflictError` if it was written with other options, or by another number of ranks.
        """
        folder = self.newest()
        if folder is None:
            return False
        state = torch.load(folder / "rank_0.pt", weights_only=True)
        self._check(folder, state)
        state = torch.load(folder / f"rank_{self._strategy.rank}.pt", weights_only=True)
        self._strategy.enter("train")
        self._strategy.load_ckpt(folder)
        trainer.load_state_dict(state["trainer"])
        set_random_states(state["random"])
        return True

    def newest(self) -> Path | None:
        """The checkpoint of the highest step. Every rank sees the same folder."""
        if not self._args.ckpt_dir:
            return None
        complete = [one for one in self._root.glob("step_*") if re.fullmatch(r"step_\d+", one.name)]
        return max(complete, default=None)

    def _check(self, folder: Path, state: dict[str, Any]) -> None:
        if state["world_size"] != self._strategy.world_size:
            raise ConflictError(
                f"{folder} was written by {state['world_size']} ranks; these are {self._strategy.world_size}"
            )
        now = asdict(self._args)
        skipped = (*MAY_CHANGE, "steps") if self._args.lr_scheduler in COUNTLESS else MAY_CHANGE
        changed = [name for name, was in state["arguments"].items() if name not in skipped and now.get(name) != was]
        if changed:
            said = ", ".join(f"--{name} {state['arguments'][name]}, now {now.get(name)}" for name in changed)
            raise ConflictError(
                f"{folder} was written with other options: {said}. Pass another --ckpt_dir to start anew"
            )


def random_states() -> dict[str, Any]:
    """Of Python, NumPy and PyTorch: functions that compute rewards may use any."""
    version, state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(state), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """The other way round."""
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
