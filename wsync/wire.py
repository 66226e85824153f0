"""Frames of the control plane: msgpack, length-prefixed, bounded before allocation. No pickle."""

from wsync.plan import Bucket, Plan, TensorMeta, TensorSpec  # noqa: F401


def pack(message: object) -> bytes:
    """Encode plain data (None, bool, int, float, str, bytes, list, tuple, dict), dtypes and contract dataclasses."""
    raise NotImplementedError


def unpack(data: bytes) -> object:
    """Decode what `pack` made; sequences come back as tuples. Raises `ProtocolError` on anything else."""
    raise NotImplementedError
