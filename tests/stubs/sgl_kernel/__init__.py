"""Stub: SGLang's kernels exist for CUDA only; on a CPU without AMX it takes its PyTorch paths."""

from lazy_stub import stub

stub(__name__, "0.4.10")
