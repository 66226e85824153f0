"""Parts of a flattened tensor, and their algebra.

Everything that wsync moves is a part of some full tensor: an FSDP shard, a TP slice, one expert of a stack, the q
rows of a fused qkv. Flatten the full tensor and each of them is a *nested strided run*: an offset, and sizes with
strides, outermost first. Positions are in elements. This file is arithmetic on integers: no tensor is moved.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """Elements `offset + sum(i_k * strides[k])` for all `0 <= i_k < sizes[k]`, enumerated with the last index fastest.

    A region is *monotone* when that enumeration never goes back or repeats; shards, slices and experts all are.
    The set operations need monotone regions and raise `ValueError` otherwise.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
