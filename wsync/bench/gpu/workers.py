"""What an engine's workers say of themselves: which process each of them is, and where its parameters lie."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from wsync import wire
from wsync.adapters.engines.sglang_calls import Calls, Updates
from wsync.bench.gpu import engines
from wsync.bench.gpu.far import Far

_TELL = f"{__name__}.tell"
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One worker."""

    pid: int
    addresses: Mapping[str, int]
    """`data_ptr` of its parameters by name."""


def report(model: nn.Module) -> bytes:
    """The worker's side: of itself and of its part of the model."""
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    return wire.pack((os.getpid(), addresses))


def tell(model: nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """As a custom weight loader of SGLang: `report` into the file that the one "tensor" is called after."""
    Path(named_tensors[0][0]).write_bytes(report(model))


def seen(engine: Any) -> list[Seen]:
    """All workers of an engine that the bench started, or of that behind a `Far`."""
    if isinstance(engine, Far):
        reports = engine.ask("reports")
    elif engines.is_sglang(engine):
        reports = [_report_of_sglang(engine)]
    else:
        reports = engine.collective_rpc("loop_report")
    found = [cast("tuple[int, Mapping[str, int]]", wire.unpack(one)) for one in reports]
    return [Seen(pid=pid, addresses=addresses) for pid, addresses in found]


def places_of(engine: Any) -> list[Mapping[str, int]]:
    """Where the parameters of each worker lie."""
    return [worker.addresses for worker in seen(engine)]


def _report_of_sglang(engine: Any) -> bytes:
    """SGLang answers an update with no more than whether it was made."""
    updates = Updates(Calls(engine, "SGLang"), workers=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report"
        updates.begin(_PATIENCE_S)
        try:
            updates.send([(str(path), torch.zeros(1))], _TELL, _PATIENCE_S)
        finally:
            updates.end(_PATIENCE_S)
        return path.read_bytes()
