"""Stub: the package on the index links CUDA, and SGLang imports it for images."""

from lazy_stub import stub

stub(__name__, "0.28.0")
