"""vLLM's CPU build without its oneDNN repacking, for a demo that compares weights bit for bit.

That build repacks linear weights into an opaque layout after loading, which nobody can compare with the trainer's. With
the switch below it keeps them as the GPU build does. (wsync takes the repacked model too, through vLLM's own reload.)
vLLM imports this module in each of its workers, before the model is built.
"""

import vllm._custom_ops as ops

from wsync.adapters.engines.vllm_worker import WorkerExtension

ops._supports_onednn = False


class PlainWeights(WorkerExtension):
    """wsync's extension, in a worker whose weights stay plain."""
