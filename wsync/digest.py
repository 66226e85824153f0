"""A 64-bit digest of a tensor that knows where each word belongs, and that parts of a tensor add up to.

    digest = sum over words of mix(word XOR key(position)) modulo 2**64

`position` counts words in the full tensor, wherever the word lies now. So ranks digest what they hold, and the sum of
their digests is the digest of the whole: nothing is gathered. `mix` is a bijection (the finalizer of SplitMix64, by
Steele, Lea and Flood), so one changed word always shows; words that changed places show but for a chance near 2**-64.
It finds accidents, not forgeries. Words have 8 bytes where every part begins and ends on 8, else fewer: `word_bytes`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from wsync.errors import DigestError, first_five
from wsync.plan import TensorSpec, as_bytes
from wsync.regions import Region

# Large enough to hide the cost of a call, small enough that two temporaries stay in a core's cache.
_CPU_BLOCK_WORDS = 1 << 16
_DEVICE_BLOCK_WORDS = 1 << 22

_WORD_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_KEY_STEP = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def word_bytes(spec: TensorSpec) -> int:
    """Bytes of a word for this tensor: the largest of 8, 4, 2, 1 such that no word lies in two owners' parts.

    `spec.dtype` is the wire dtype. Workers know no owners: what comes out goes into the plan, as `spec.word_bytes`.
    """
    unit = math.gcd(8, spec.nbytes)
    for owner in spec.owners:
        offset, rows, run = _byte_rows(owner.region, spec.dtype.itemsize)
        unit = math.gcd(unit, offset, run, *(stride for _, stride in rows))
    return unit


def digest(data: torch.Tensor, *, word_bytes: int, first_word: int = 0) -> int:
    """Digest, `0 .. 2**64`, of a whole tensor or of a contiguous chunk of one, as it is in memory.

    Args:
        data: any shape and dtype; only its bytes count. On any device; waits for it.
        word_bytes: that of the tensor's spec.
        first_word: bytes of the full tensor before `data`, divided by `word_bytes`.

    Raises `ValueError` if `data` is not a number of whole words.
    """
    raw = as_bytes(data)
    return _digest(raw, Region.span(first_word * word_bytes, raw.numel()), 1, word_bytes)


def digest_part(data: torch.Tensor, region: Region, *, word_bytes: int) -> int:
    """What a part adds to the digest of its tensor, `0 .. 2**64`.

    Args:
        data: the part's elements in the wire dtype, in the order of `region`; any shape, any device.
        region: the part, in elements of the full tensor.
        word_bytes: that of the tensor's spec.

    Raises `ValueError` if sizes differ, or if a run of the part is not a number of whole words at a word's place.
    """
    if data.numel() != region.numel:
        raise ValueError(f"{data.numel()} elements of data for {region}, which has {region.numel}")
    return _digest(as_bytes(data), region, data.itemsize, word_bytes)


def check_digests(engine: str, expected: Mapping[str, int], workers: Sequence[Mapping[str, int]]) -> None:
    """Raises `DigestError` unless each worker of `engine` has found what is expected."""
    for rank, found in enumerate(workers):
        wrong = [name for name, value in expected.items() if found.get(name) != value]
        if wrong:
            raise DigestError(
                f"{engine}, worker {rank}: the bytes that arrived are not the bytes that were sent in "
                f"{len(wrong)} tensor(s): {first_five(wrong)}"
            )


def _byte_rows(region: Region, itemsize: int) -> tuple[int, list[tuple[int, int]], int]:
    """`region` in bytes: offset, `(size, stride)` of the nested rows, and the length of each contiguous run."""
    strides = (*(stride * itemsize for stride in region.strides), 1)
    part = Region(region.offset * itemsize, (*region.sizes, itemsize), strides).coalesce()
    rows = list(zip(part.sizes, part.strides, strict=True))
    run, _ = rows.pop() if rows and rows[-1][1] == 1 else (1, 1)
    return part.offset, rows, run


def _digest(raw: torch.Tensor, region: Region, itemsize: int, word_bytes: int) -> int:
    """Digest of the bytes `raw` `[n]` that belong at `region`, which counts in items."""
    offset, rows, run = _byte_rows(region, itemsize)
    if any(count % word_bytes for count in (offset, run, *(stride for _, stride in rows))):
        raise ValueError(f"{region} is not whole words of {word_bytes} bytes in place; use word_bytes(spec)")
    if not raw.numel():
        return 0
    if raw.storage_offset() % word_bytes:
        raw = raw.clone()
    sizes = (*(size for size, _ in rows), run // word_bytes)
    strides = (*(stride // word_bytes for _, stride in rows), 1)
    return _sum(raw.view(_WORD_DTYPES[word_bytes]), offset // word_bytes, sizes, strides)


def _sum(words: torch.Tensor, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Sum of mixed words; positions are `offset` and nested rows of `sizes`, `strides`, in words."""
    limit = _CPU_BLOCK_WORDS if words.device.type == "cpu" else _DEVICE_BLOCK_WORDS
    blocks = list(_blocks(sizes, strides, limit))
    keys = _keys(blocks[0][1], strides[-len(blocks[0][1]) :], words.device)
    mixed, shifted = torch.empty_like(keys), torch.empty_like(keys)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    done = 0
    for start, block_sizes in blocks:
        count = math.prod(block_sizes)
        x, y = mixed[:count], shifted[:count]
        torch.add(keys[:count], _signed((offset + start) * _KEY_STEP), out=x)
        x.bitwise_xor_(words[done : done + count])
        for shift, factor in _MIX:
            torch.bitwise_right_shift(x, shift, out=y)
            # The shift of a signed integer copies the sign down: clear what it filled in.
            x.bitwise_xor_(y.bitwise_and_((1 << (64 - shift)) - 1))
            if factor != 1:
                x.mul_(_signed(factor))
        total += x.sum()
        done += count
    return int(total) % (1 << 64)


def _blocks(sizes: tuple[int, ...], strides: tuple[int, ...], limit: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Cut nested rows, in order, into `(start, sizes)` of at most `limit` words; the first is the largest.

    Each is rows of the same inner dims, so that the positions of a shorter one are a prefix of the first one's.
    """
    inner = math.prod(sizes[1:])
    if inner > limit:
        for row in range(sizes[0]):
            for start, block in _blocks(sizes[1:], strides[1:], limit):
                yield row * strides[0] + start, block
        return
    step = limit // inner
    for row in range(0, sizes[0], step):
        yield row * strides[0], (min(step, sizes[0] - row), *sizes[1:])


def _keys(sizes: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Position times key step, for nested rows that begin at 0: int64 `[words]`."""
    keys = torch.zeros(1, dtype=torch.int64, device=device)
    for size, stride in zip(sizes, strides, strict=True):
        row = torch.arange(size, dtype=torch.int64, device=device) * _signed(stride * _KEY_STEP)
        keys = (keys[:, None] + row).view(-1)
    return keys


def _signed(value: int) -> int:
    """`value` modulo 2**64 as an int64 holds it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
