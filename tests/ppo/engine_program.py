"""What an engine answers: `-m tests.ppo.engine_program trained|fresh FOLDER OPTIONS...` writes FOLDER/<rank>.json.

`trained`: after a run with these options, whose last sync was the engine's. `fresh`: as it starts from `--pretrain`.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from integrations.ppo.arguments import Arguments, parse
from integrations.ppo.strategy import get_strategy
from integrations.ppo.strategy.base import Strategy
from integrations.ppo.train import build, close, join, shared_folder
from tests.ppo.strategy_steps import GREEDY


def _answers(strategy: Strategy) -> list[Any]:
    """Greedy ones."""
    return [
        asdict(one) for one in strategy.gather_and_generate(GREEDY, [[40, 50, 60], [100 + strategy.rank], [70, 71]])
    ]


def _trained(args: Arguments, folder: Path) -> tuple[Strategy, list[Any]]:
    """And what it answered before."""
    trainer = build(args, folder)
    before = _answers(trainer.strategy)
    trainer.fit()
    return trainer.strategy, before


def _fresh(args: Arguments) -> tuple[Strategy, list[Any]]:
    """Nobody syncs: there is no actor."""
    strategy = get_strategy(args)
    strategy.setup_inference_engine(args, args.engine_type)
    return strategy, []


def main(kind: str, out: str, *argv: str) -> None:
    """On every rank."""
    args = parse([*argv])
    join(args.timeout_s)
    with shared_folder() as folder:
        strategy, before = _trained(args, folder) if kind == "trained" else _fresh(args)
        facts = {"before": before, "after": _answers(strategy)}
        (Path(out) / f"{strategy.rank}.json").write_text(json.dumps(facts))
        close(strategy)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
