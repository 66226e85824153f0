"""Program: syncs to a worker process where PyTorch's allocator makes expandable segments.

`python -m tests.engines.expandable_program FOLDER DEVICE TRANSPORT`: FOLDER is a checkpoint of `hf_models`. Prints what
the memory manager says of the device.
"""

import sys
from pathlib import Path

import torch

import wsync
from tests.engines.hf_models import FAMILIES, seeded
from wsync.adapters.engines.hf import HFEngine
from wsync.deadline import Deadline


def main(folder: Path, device: str, transport: str) -> None:
    """Three syncs; each time every parameter over there has the bits of the actor's."""
    actor = seeded(FAMILIES["llama"], 1).to(device)
    settings = wsync.SyncConfig(transport=transport, bucket_bytes=64 << 10, timeout_s=60.0)
    with HFEngine.launch(folder, device=device) as engine, wsync.connect(actor, engine, config=settings) as session:
        for _ in range(3):
            with torch.no_grad():
                for parameter in actor.parameters():
                    parameter.normal_()
            assert session.sync().transport == transport
            for name, parameter in actor.named_parameters():
                [got] = engine.read(name, Deadline.after(60.0))
                assert torch.equal(got.view(torch.uint8), parameter.detach().cpu().view(torch.uint8)), name
    print(wsync.MemoryManager(models={"actor": actor}).explain().splitlines()[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
