"""Which tensors can be exported, and what of them is memory."""

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wsync.errors import MismatchError, UnsupportedError
from wsync.strided import lacking_bytes


def check_exportable(name: str, tensor: torch.Tensor) -> None:
    """Raise `UnsupportedError` for tensors without plain memory of their own."""
    reason = None
    if is_lazy(tensor):
        reason = "is not initialised yet; run a forward first"
    elif tensor.layout != torch.strided:
        reason = f"has layout {tensor.layout}; only strided tensors can be exported"
    elif tensor.device.type == "meta":
        reason = "is on the meta device and has no bytes; materialise it first"
    elif is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor):
        reason = f"is a {type(tensor).__name__}, whose bytes lie in other tensors; export those instead"
    if reason:
        raise UnsupportedError(f"{name} {reason}")


def check_present(name: str, local: torch.Tensor) -> None:
    """Raise `MismatchError` if there is no memory behind `local`, or it is a shard to this producer's surprise."""
    if isinstance(local, DTensor):
        raise MismatchError(f"{name} is a DTensor: it was sharded after connect; connect again")
    lacking = lacking_bytes(local)
    if lacking:
        raise MismatchError(
            f"{name} has {local.nbytes} bytes, of which its storage lacks {lacking}: it was freed or offloaded; bring "
            f"it back before a sync"
        )


def plain(local: torch.Tensor) -> torch.Tensor:
    """`local` itself, or a copy if its memory holds the conjugate or the negative of what it shows."""
    return local.detach().resolve_conj().resolve_neg()
