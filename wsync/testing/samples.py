"""Random tensors of every layout and dtype that must arrive bit-exactly, and how to compare them."""

import hashlib
from collections.abc import Iterable, Mapping

import torch

from wsync.plan import Bucket, Plan, TensorSpec

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
)


def random_tensor(shape: Iterable[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A contiguous tensor of random bits: any bit pattern of `dtype` may appear, NaNs included; bool holds 0 and 1."""
    shape = tuple(shape)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    return torch.randint(top, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def tensor_zoo(seed: int, large_bytes: int) -> dict[str, torch.Tensor]:
    """One of everything: each dtype odd, 0-dim and empty; transposed, strided, expanded; one of `large_bytes` bytes."""
    g = torch.Generator().manual_seed(seed)
    zoo: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        name = str(dtype).replace("torch.", "as_")  # "bfloat16" alone is a method of every module
        zoo[f"{name}.odd"] = random_tensor((3, 7), dtype, g)
        zoo[f"{name}.scalar"] = random_tensor((), dtype, g)
        zoo[f"{name}.empty"] = random_tensor((4, 0), dtype, g)
        zoo[f"{name}.vector"] = random_tensor((129,), dtype, g)
    zoo["transposed"] = random_tensor((11, 6), torch.float32, g).T
    zoo["strided"] = random_tensor((10, 14), torch.bfloat16, g)[1::2, ::3]
    zoo["expanded"] = random_tensor((1, 9), torch.float16, g).expand(5, 9)
    zoo["large"] = random_tensor((large_bytes // 4,), torch.float32, g)
    return zoo


def tiny_tensors(seed: int, count: int) -> dict[str, torch.Tensor]:
    """`count` tensors of 1 to 9 elements, dtypes in turn, so that narrow odd sizes precede wider dtypes."""
    g = torch.Generator().manual_seed(seed)
    return {f"tiny.{i}": random_tensor((i % 9 + 1,), DTYPES[i % len(DTYPES)], g) for i in range(count)}


def plan_of(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> Plan:
    """A plan that moves `tensors` in their own dtypes."""
    specs = [TensorSpec(name=name, shape=tuple(t.shape), dtype=t.dtype) for name, t in tensors.items()]
    return Plan.pack(specs, bucket_bytes)


def fill_slot(bucket: Bucket, slot: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put what `bucket` holds of `tensors` into `slot` (uint8)."""
    for meta, view in bucket.views(slot):
        source = tensors[meta.name]
        if not meta.is_whole:
            first = meta.chunk_offset // meta.dtype.itemsize
            source = source.reshape(-1)[first : first + view.numel()]
        view.copy_(source)


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name -> hex digest of the tensor's bytes in row-major order."""
    return {name: hashlib.blake2b(bytes_of(t).numpy().data).hexdigest() for name, t in tensors.items()}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in row-major order, uint8, 1-D. A view if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
