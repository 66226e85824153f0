"""Program: engines in this process. `python -m tests.engines.vllm_inproc MODELS OUT`."""

import sys
from pathlib import Path
from typing import Any

import tests.engines.vllm_plain  # noqa: F401 - before the first engine
import wsync
from tests.engines.vllm_models import generate, prompts
from tests.engines.vllm_program import SETTINGS, Facts, Tripwire, caught, fail, look, sampling, start, tokens, trainer
from tests.engines.vllm_program import update as plain_update
from tests.engines.vllm_program import write


def main(models: Path, out: Path) -> None:
    """Run everything, each engine once."""
    facts: Facts = {}
    llm = start(models / "llama_a")
    facts["llama"] = plain_update(llm, models / "llama_a", models / "llama_b")
    write(out, facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
