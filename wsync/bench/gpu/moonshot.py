"""Moonshot's checkpoint-engine as a rival: its own package on both sides, its parameter server in its own process.

    this process                    parameter server                      vLLM's worker
    update       -----------------> ParameterServer.update
                 <----------------- which sockets to listen on
    collective_rpc("update_weights_from_ipc") --------------------------> its own worker extension
                                    buckets: CUDA IPC, ZeroMQ ----------> load_weights, process_weights_after_loading
                 -----------------> the worker is through
                 <----------------- seconds

It keeps checkpoints in pinned host memory. So its `update` has a copy from host to device in it, and what a trainer's
weights on the device take to get to host memory comes on top (`register_and_update`).
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import wsync
from wsync.bench.gpu import engines, models
from wsync.bench.gpu.checks import check_tokens, free, in_place, outcome_of
from wsync.bench.gpu.far import Far
from wsync.bench.gpu.outcome import Limit, Outcome, in_turn

SERVER = "wsync.bench.gpu.moonshot_server"
UPDATE, FROM_DEVICE = "checkpoint-engine update", "checkpoint-engine register and update"
INCLUDES = (
    "pinned host memory to device, broadcast on one NCCL rank, copy into its IPC buffer, load_weights, "
    "process_weights_after_loading, and allocating and freeing its buffers; its process group is made before"
)

_SETTINGS = ("RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "LOGURU_LEVEL=WARNING")
"""It reads its rank from there, also if it is told."""

_SEED = 9


class Moonshot:
    """A parameter server of checkpoint-engine with a model of its own, and the way from there into an engine."""

    def __init__(self, far: Far) -> None:
        """Its process, which has been started. Raises `PeerError` with its traceback if it cannot start."""
        self.seconds: list[float] = []
        """Of each `update`, as the server took them."""

        self._far = far
        far.hear()

    def randomize(self, seed: int) -> None:
        """As `models.randomize`, of its model."""
        self._far.ask("randomize", seed)

    def register(self) -> float:
        """Its weights from the device into its pinned memory, which is kept from one time to the next. In seconds."""
        return float(self._far.ask("register"))

    def update(self) -> None:
        """Its pinned memory into the engine."""
        self.seconds.append(float(self._far.ask("update")))

    def register_and_update(self) -> None:
        """Both: what a trainer with new weights on the device waits for."""
        self.register()
        self._far.ask("update")


def process_beside(engine: Any, shape: str, dtype: torch.dtype) -> Far:
    """Start its process, on this process's GPU; `engine` is what it updates."""

    def load(sockets: Mapping[str, str]) -> None:
        engine.collective_rpc("update_weights_from_ipc", args=(dict(sockets),))

    return Far(SERVER, shape, str(dtype), settings=_SETTINGS, heed=load)


def beside_moonshot(name: str, rounds: int) -> Outcome:
    """A module into a vLLM with processes of its own, wsync and checkpoint-engine in turn."""
    with tempfile.TemporaryDirectory() as folder:
        config = models.config_of(models.DENSE, torch.bfloat16)
        place = models.make_folder(config, Path(folder))
        engine = engines.start_vllm(place, "bfloat16", extension=f"{SERVER}.Extension")
        actor = models.make_actor(config, torch.bfloat16, 1)
        limits = (Limit(reference=UPDATE, factor=1.0), Limit(reference=FROM_DEVICE, factor=1.0))
        outcome = outcome_of(name, actor, torch.bfloat16, limits)
        free()
        settings = wsync.SyncConfig(transport="cuda_ipc")
        with (
            in_place(outcome, engine),
            wsync.connect(actor, engine, config=settings) as session,
            process_beside(engine, models.DENSE, torch.bfloat16) as far,
        ):
            rival = Moonshot(far)
            outcome.facts["seconds of the first register, which pins"] = rival.register()
            references = {UPDATE: rival.update, FROM_DEVICE: rival.register_and_update}
            outcome.samples = in_turn(session.sync, references, rounds)
            outcome.facts["seconds of its updates, by its own clock"] = rival.seconds
            outcome.facts["its update includes"] = INCLUDES
            check_tokens(outcome, session, actor, engine)
            rival.randomize(_SEED)
            models.randomize(actor, _SEED)
            rival.register_and_update()
            expected = models.greedy(actor, engines.prompts(), engines.NEW_TOKENS)
            outcome.checks["tokens of its own update"] = engines.answers_of(engine) == expected
    return outcome
