"""The fixture for loading in place: importing this keeps vLLM's CPU build from packing linear weights for oneDNN.

Its GPU build leaves them as they are loaded, and that is what these tests stand in for.
"""

import vllm._custom_ops as ops

from tests.engines.vllm_extension import LookingExtension

ops._supports_onednn = False


class PlainExtension(LookingExtension):
    """In a module of its own, so that it acts in each worker process that vLLM starts with it."""
