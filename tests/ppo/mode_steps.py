"""What the tests of trainers' modes have two ranks do."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import integrations.ppo
from integrations.ppo.train import close, shared_folder
from tests.ppo.rank_steps import Recorder, arguments, built
from wsync.testing.ranks import Rank


def of_the_readme(me: Rank, options: str) -> tuple[list[Mapping[str, float]], bool]:
    """What a run in the mode logs that README.md has as an example, and whether its options are still those given."""
    text = (Path(integrations.ppo.__file__).parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    with shared_folder() as folder:
        options = f"{options} --trainer every-other"
        trainer = built(me, options, folder)
        trainer.monitor = recorder = Recorder()
        trainer.fit()
        kept = trainer.args == trainer.strategy.args == arguments(options)
        close(trainer.strategy)
    return recorder.lines, kept
