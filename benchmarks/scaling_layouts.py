"""Ways to spread a trainer and its engines over the GPUs of one host."""

from dataclasses import dataclass
from typing import Literal

from wsync.bench.gpu.models import DENSE, MOE
from wsync.config import PathMode

Trainer = Literal["fsdp2", "hsdp", "zero3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One case: a trainer in fp32, and vLLM in bf16."""

    name: str
    ranks: int
    """Of the trainer, on GPUs from 0 on."""

    trainer: Trainer = "fsdp2"
    shape: str = DENSE
    tp: int
    """Workers of each engine."""

    engines: int = 1
    apart: bool = False
    """Whether engines have GPUs of their own, behind those of the trainer; else they share them."""

    path: PathMode = "pull"

    @property
    def gpus(self) -> int:
        """Of both."""
        return self.ranks + self.tp * self.engines if self.apart else self.ranks

    @property
    def owners(self) -> list[int]:
        """The rank that owns each engine."""
        return [0] if self.apart else [number * self.tp for number in range(self.engines)]

    def places(self, engine: int) -> list[int]:
        """GPUs of the workers of one engine, in their order."""
        first = engine * self.tp + (self.ranks if self.apart else 0)
        return list(range(first, first + self.tp))


def layouts(gpus: int) -> list[Layout]:
    """All that makes sense on so many GPUs: a power of two."""
    beside: list[Layout] = []
    for path, word in (("pull", "pull"), ("buckets", "buckets")):
        beside.append(Layout(name=f"fsdp2-{gpus}-tp{gpus}-{word}", ranks=gpus, tp=gpus, path=path))  # type: ignore[arg-type]
    if gpus < 2:
        return beside
    half = gpus // 2
    for path in ("pull", "buckets"):
        name = f"fsdp2-{gpus}-2xtp{half}-{path}"
        beside.append(Layout(name=name, ranks=gpus, tp=half, engines=2, path=path))  # type: ignore[arg-type]
    beside.append(Layout(name=f"zero3-{gpus}-tp{gpus}-pull", ranks=gpus, tp=gpus, trainer="zero3"))
    beside.append(Layout(name=f"moe-{gpus}-tp{gpus}-pull", ranks=gpus, tp=gpus, shape=MOE))
    if half > 1:
        beside.append(Layout(name=f"hsdp-2x{half}-tp{gpus}-pull", ranks=gpus, tp=gpus, trainer="hsdp"))
    apart = Layout(name=f"fsdp2-{half}-apart-tp{half}-nccl", ranks=half, tp=half, apart=True, path="buckets")
    return [*beside, apart]
