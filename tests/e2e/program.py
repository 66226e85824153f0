"""Program for every rank of the trainer: one engine, and trainers that sync into it in turn.

`python -m tests.e2e.program KIND FAMILY TRAINERS FOLDER`, under torchrun if the kind has several ranks; TRAINERS are
joined by ",". Writes FOLDER/facts.json: {"launch": facts, trainer: facts}, as far as it came.

The last rank generates what is expected: in a process that started SGLang, transformers was seen to give other tokens.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import wsync
from tests.e2e.bits import Bits, adapted, least_bytes
from tests.e2e.engines import KINDS, Kind, OpenEngine, Serving
from tests.e2e.families import Answers, answers_of, build, prompts
from tests.e2e.trainers import TRAINERS, AnyTrainer, State

Facts = dict[str, Any]
SYNCS = 3
MOST_STEPS = 12
CLEAR = 1e-3
"""Logits of two best tokens that are closer than this may be in another order somewhere else, by rounding."""

LIVELY = 4
"""An answer with fewer different tokens proves little."""


class Judge:
    """Knows what the engine must say."""

    def __init__(self, family: str) -> None:
        self._family = family
        self._seed = 0
        self.expected: list[list[int]] = []

    def ask(self, state: Mapping[str, torch.Tensor]) -> Answers:
        """*Collective.* What transformers says with the weights of rank 0, generated on the last rank."""
        last = dist.get_world_size() - 1
        ours = {name: tensor.detach().clone().contiguous() for name, tensor in sorted(state.items())}
        for tensor in ours.values():
            dist.broadcast(tensor, 0)
        said = [answers_of(self._family, ours) if dist.get_rank() == last else None]
        dist.broadcast_object_list(said, last)
        assert said[0] is not None
        return said[0]

    def advance(self, trainer: AnyTrainer) -> int:
        """*Collective.* Train until each prompt has another answer than before, clear and lively. Returns the steps."""
        for steps in range(1, MOST_STEPS + 1):
            self._seed += 1
            trainer.step(self._seed)
            said = self.ask(trainer.full())
            new = all(now != before for now, before in zip(said.tokens, self.expected, strict=True))
            lively = all(len(set(answer)) >= LIVELY for answer in said.tokens)
            if new and lively and said.margin > CLEAR:
                self.expected = said.tokens
                return steps
        raise AssertionError(f"{MOST_STEPS} steps, and no answers that are all new, clear and lively")


def generated(engine: Serving | None) -> list[list[list[int]]]:
    """*Collective.* What every engine says, in the order of the ranks that own one."""
    mine = engine.generate(prompts()) if engine is not None else None
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return [tokens for tokens in everybody if tokens is not None]


def summed(number: int) -> int:
    """*Collective.* Over all ranks."""
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def syncs(
    trainer: AnyTrainer,
    engine: Serving | None,
    judge: Judge,
    config: wsync.SyncConfig,
    bits: Callable[[State], Facts] | None,
) -> Facts:
    """*Collective.* Train and sync `SYNCS` times in a row."""
    facts: Facts = {"expected": [], "tokens": [], "steps": [], "pulled bytes": [], "bits": []}
    began = time.monotonic()
    with wsync.connect(trainer.actor, engine.handle if engine is not None else None, config=config) as session:
        for _ in range(SYNCS):
            facts["steps"].append(judge.advance(trainer))
            trainer.score()
            report = session.sync()
            facts["expected"].append(judge.expected)
            facts["tokens"].append(generated(engine))
            facts["pulled bytes"].append(summed(report.pulled_nbytes))
            if bits is not None:
                facts["bits"].append(bits(trainer.full()))
    facts |= {"transport": report.transport, "through loader": report.through_loader, "tensors": report.tensors}
    return {**facts, "seconds": round(time.monotonic() - began, 1)}


def compared(kind: Kind, engine: Serving | None, family: str, folder: Path) -> Callable[[State], Facts] | None:
    """*Collective.* For `syncs`, where the workers that pull can be looked into."""
    if kind.path != "pull" or kind.needs is None:
        return None
    assert engine is None or isinstance(engine, OpenEngine)
    bits = Bits(engine, family, folder / "launch")
    return lambda state: bits.compare(state, folder / "now")


def join() -> int:
    """Make the default group, of one rank if nobody launched several. Returns the rank."""
    patience = timedelta(seconds=300)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=patience)
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=patience)
    return dist.get_rank()


def write(out: Path, facts: Facts) -> None:
    """Whole or not at all."""
    scratch = out.with_suffix(".scratch")
    scratch.write_text(json.dumps(facts))
    scratch.replace(out)


def main(kind_name: str, family: str, names: list[str], folder: Path) -> None:
    """Start the engine, compare it with transformers before anything is synced, then take the trainers in turn."""
    torch.set_num_threads(1)
    kind, rank, judge = KINDS[kind_name], join(), Judge(family)
    model = build(family, 1000)
    judge.expected = judge.ask(model.state_dict()).tokens
    if rank == 0:
        model.save_pretrained(folder / "launch")
    dist.barrier()
    engine = kind.start(folder / "launch") if rank == 0 or kind.everywhere else None
    config = wsync.SyncConfig(
        bucket_bytes=64 << 10, timeout_s=120.0, transport=kind.transport, path=kind.path, senders=kind.senders
    )
    facts: Facts = {"launch": {"expected": [judge.expected], "tokens": [generated(engine)]}}
    bits = compared(kind, engine, family, folder)
    for number, name in enumerate(names):
        trainer = TRAINERS[name](family, number, folder)
        facts[name] = syncs(trainer, engine, judge, config, bits)
        if kind.path == "pull":
            least = least_bytes(folder / "launch", kind.tp, {*adapted(name, family), *kind.travel})
            facts[name]["least bytes"] = kind.engines * least
        if rank == 0:
            write(folder / "facts.json", facts)
            print(f"done: {name}", flush=True)
        del trainer
        gc.collect()
    if engine is not None:
        engine.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a gloo rank that runs the interpreter's own exit may abort in a destructor


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3].split(","), Path(sys.argv[4]))
