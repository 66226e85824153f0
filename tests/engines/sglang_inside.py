"""A plugin of SGLang for tests: what they do inside of its schedulers, through `Engine.collective_rpc`.

SGLang finds it where `tests/stubs` is on the path, and loads it if SGLANG_PLUGINS names "wsync-tests".
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.engines.inside import Seen, snapshot
from tests.engines.pull_trap import Trap, set_trap


def register() -> None:
    """Give SGLang's Scheduler two methods."""
    module: Any = sys.modules.get("sglang.srt.managers.scheduler")
    if module is not None:  # the detokenizer has none
        module.Scheduler.wsync_test_look, module.Scheduler.wsync_test_trap = _look, _trap


def look(engine: Any) -> list[Seen]:
    """Every worker's parameters, see `inside.snapshot`."""
    with tempfile.TemporaryDirectory() as folder:
        engine.collective_rpc("wsync_test_look", folder=folder)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(engine.server_args.tp_size)]


def trap(engine: Any, one: Trap) -> None:
    """Set it in every worker."""
    engine.collective_rpc("wsync_test_trap", **one.as_message())


def _look(scheduler: Any, folder: str) -> None:
    model = scheduler.tp_worker.model_runner.model
    (Path(folder) / str(_rank())).write_text(json.dumps(snapshot(model, buffers=False)))


def _trap(scheduler: Any, **message: Any) -> None:
    set_trap(Trap(**message), _rank())


def _rank() -> int:
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    rank: int = get_tensor_model_parallel_rank()
    return rank
