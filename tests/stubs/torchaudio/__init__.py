"""Stub: the package on the index links CUDA, and SGLang imports it for sound."""

from lazy_stub import stub

stub(__name__, "2.13.0")
