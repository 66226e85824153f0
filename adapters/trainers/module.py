"""Producer for a module whose parameters lie whole in every process: plain, DDP, compiled, checkpoint-wrapped."""

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from wsync.adapters.trainers.watching import WatchingProducer


class ModuleProducer(WatchingProducer):
    """Exports a module as it is. Contiguous parameters are handed over in place, others are copied by `fill`."""

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is a module that no framework has sharded."""
        if not isinstance(obj, nn.Module):
            return False
        if any(isinstance(module, FullyShardedDataParallel) for module in obj.modules()):
            return False
        # DeepSpeed marks the parameters that it has partitioned
        return not any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in obj.parameters())
