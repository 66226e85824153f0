"""What two processes must have in common before they share a communicator of NCCL's.

NCCL picks its algorithm, its protocol and the way to each peer on each rank by itself, out of its environment. Ranks
that pick differently do not fail: they wait for each other for ever.
"""

import os
from collections.abc import Mapping, Sequence

ALIKE = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_NTHREADS"),
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_CGA_CLUSTER_SIZE"),
    *("NCCL_CUMEM_ENABLE", "NCCL_CUMEM_HOST_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_COLLNET_ENABLE"),
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_P2P_READ_ENABLE", "NCCL_SHM_DISABLE"),
    *("NCCL_P2P_USE_CUDA_MEMCPY", "NCCL_P2P_PXN_LEVEL", "NCCL_PXN_DISABLE", "NCCL_CROSS_NIC", "NCCL_RUNTIME_CONNECT"),
    *("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_NET_GDR_LEVEL", "NCCL_NET_SHARED_BUFFERS", "NCCL_IB_DISABLE"),
    *("NCCL_TUNER_PLUGIN", "NCCL_TUNER_CONFIG_PATH", "NCCL_NCHANNELS_PER_NET_PEER", "NCCL_SINGLE_RING_THRESHOLD"),
)
"""Variables that ranks must agree on. Others are for one host (interfaces, adapters, topology) or for one's eyes."""

_VERSION = "NCCL's version"


def forced_to_block() -> bool:
    """Whether the environment has every communicator of this process block, so that none could be given up."""
    return os.environ.get("NCCL_COMM_BLOCKING") == "1"


def fingerprint(version: str) -> Mapping[str, str]:
    """Of this process: NCCL's version, and those of `ALIKE` that are set."""
    return {_VERSION: version, **{name: os.environ[name] for name in ALIKE if name in os.environ}}


def differences(one: Mapping[str, str], other: Mapping[str, str], whose: str, others: str) -> Sequence[str]:
    """For people: each name of two fingerprints that has not one value, with both and whose they are."""
    return [
        f"{name} is {_shown(one, name)} {whose} and {_shown(other, name)} {others}"
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name)
    ]


def _shown(fingerprint: Mapping[str, str], name: str) -> str:
    return repr(fingerprint[name]) if name in fingerprint else "not set"
