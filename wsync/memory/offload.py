"""Offload and reload: the storages of tensors go to host memory and come back under the same tensor objects."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from wsync.deadline import Deadline
from wsync.errors import AdmissionError, MemoryStateError, first_five
from wsync.memory.host_copies import HostCopies
from wsync.memory.host_pool import HostPool
from wsync.memory.resident import require_away, require_present
from wsync.memory.sizes import gib
from wsync.memory.storages import bytes_of, inner_tensors, own_memory, storages_of

_PACK_BELOW_BYTES = 1 << 20
"""Smaller storages share one block of host memory."""

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Emptied:
    """A storage that is away, and its bytes on the host, uint8 `[nbytes]`."""

    storage: torch.UntypedStorage
    host: torch.Tensor


def _nothing() -> None:
    pass


class Offload:
    """Tensors that can leave the device. Meets `wsync.memory.resident.Resident`.

    While away the tensors keep their shapes and have no memory: nobody may read or write them. PyTorch does not check
    that. Addresses may be others afterwards. Tensors on the CPU beside tensors on a device stay where they are; if all
    are on the CPU, it counts as the device.

    Args:
        name: unique among what uses `pool`.
        tensors: lists them, at every release and restore anew. Any that share a storage leave together.
        pool: where the bytes go.
        check: raises why they must not leave now; part of `check_release`.
        prepare: gives up what can be computed again, right before they leave.
    """

    def __init__(
        self,
        name: str,
        tensors: Callable[[], Iterable[torch.Tensor]],
        pool: HostPool,
        *,
        check: Callable[[], None] = _nothing,
        prepare: Callable[[], None] = _nothing,
    ) -> None:
        self.name = name
        self._tensors = tensors
        self._pool = pool
        self._check = check
        self._prepare = prepare
        self._copies = HostCopies()
        self._away: list[_Emptied] | None = None
        self._stayed: list[torch.UntypedStorage] = []

    @property
    def present(self) -> bool:
        """See `Resident`."""
        return self._away is None

    @property
    def nbytes(self) -> int:
        """See `Resident`."""
        if self._away is not None:
            return sum(emptied.host.numel() for emptied in self._away)
        return sum(storage.nbytes() for storage in storages_of(self._list()).values())

    @property
    def host_nbytes(self) -> int:
        """See `Resident`. What small storages take to begin at aligned addresses is left out."""
        return self.nbytes

    def check_release(self) -> None:
        """See `Resident`. Raises `AdmissionError` if the host has no room."""
        require_present(self)
        self._check()
        storages = list(storages_of(self._list()).values())
        self._pool.check(self.name, _block_sizes(storages), pinned=_pinned(storages))

    def check_restore(self) -> None:
        """See `Resident`. Raises `MemoryStateError` if tensors were given memory while they were away."""
        require_away(self)
        if not self._away:
            return
        stayed = {storage._cdata for storage in self._stayed}
        filled = [
            f"tensor {index} ({tensor.dtype} {list(tensor.shape)})"
            for index, tensor in enumerate(inner_tensors(self._tensors()))
            if tensor.untyped_storage().nbytes() and tensor.untyped_storage()._cdata not in stayed
        ]
        fixed = [entry for entry in self._away if not entry.storage.resizable()]
        if fixed:
            raise MemoryStateError(
                f"{self.name} is away, and {len(fixed)} of its {len(self._away)} storages can no longer be given "
                f"memory: something took a NumPy view of a tensor meanwhile, which fixes its size as it is then, at 0. "
                f"Nothing was moved; take NumPy views of what is present, or of clones"
            )
        filled += [f"a storage of {e.host.numel()} bytes" for e in self._away if e.storage.nbytes() and not filled]
        if filled:
            raise MemoryStateError(
                f"{self.name} is away, and {first_five(filled)} got memory in the meantime, from a state dict that was "
                f"loaded or an assignment to .data; {len(self._away)} storages were emptied and their bytes are still "
                f"on the host. Restore it first, then load"
            )

    def release(self, deadline: Deadline) -> None:
        """See `Resident`. Raises `AdmissionError` if the host has no room; nothing has changed then."""
        self.check_release()
        self._prepare()
        own_memory(self._list())
        storages = list(storages_of(self._list()).values())
        blocks = self._pool.take(self.name, _block_sizes(storages), pinned=_pinned(storages))
        emptied = _assign(storages, blocks)
        try:
            pairs = [(entry.host, bytes_of(entry.storage)) for entry in emptied]
            self._copies.run(pairs, deadline, f"{self.name} to be copied to the host")
        except BaseException:
            self._pool.put_back(self.name)
            raise
        self._away = emptied
        leaving = {entry.storage._cdata for entry in emptied}
        everything = storages_of(inner_tensors(self._tensors()))
        self._stayed = [storage for key, storage in everything.items() if key not in leaving]
        for entry in emptied:
            entry.storage.resize_(0)

    def restore(self, deadline: Deadline) -> None:
        """See `Resident`. Raises `AdmissionError` if the device has no room."""
        self.check_restore()
        away = self._away or []
        try:
            self._copies.run(_filled(away), deadline, f"{self.name} to be copied to the device")
        except BaseException as error:
            for entry in away:
                entry.storage.resize_(0)
            if isinstance(error, torch.OutOfMemoryError):
                raise AdmissionError(f"{self.name} needs {gib(self.nbytes)} on the device: {error}") from error
            raise
        self._away = None
        self._stayed = []
        self._pool.put_back(self.name)

    def _list(self) -> list[torch.Tensor]:
        """The tensors that leave, without wrappers."""
        found = list(inner_tensors(self._tensors()))
        on_device = [tensor for tensor in found if tensor.device.type not in ("cpu", "meta")]
        return on_device or [tensor for tensor in found if tensor.device.type == "cpu"]


def _filled(away: Sequence[_Emptied]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each storage with memory again, and its bytes: the device takes its time to allocate, copies run meanwhile."""
    for entry in away:
        entry.storage.resize_(entry.host.numel())
        yield bytes_of(entry.storage), entry.host


def _pinned(storages: Sequence[torch.UntypedStorage]) -> bool:
    return any(storage.device.type == "cuda" for storage in storages)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _block_sizes(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """Bytes of the host blocks: one for each large storage in order, then one for all small ones, if there are any."""
    sizes = [storage.nbytes() for storage in storages]
    packed = sum(_aligned(nbytes) for nbytes in sizes if nbytes < _PACK_BELOW_BYTES)
    return [nbytes for nbytes in sizes if nbytes >= _PACK_BELOW_BYTES] + ([packed] if packed else [])


def _assign(storages: Sequence[torch.UntypedStorage], blocks: Sequence[torch.Tensor]) -> list[_Emptied]:
    """Each storage with its part of the blocks that `_block_sizes` asked for."""
    large = iter(blocks)
    offset, found = 0, []
    for storage in storages:
        nbytes = storage.nbytes()
        if nbytes >= _PACK_BELOW_BYTES:
            found.append(_Emptied(storage, next(large)))
        else:
            found.append(_Emptied(storage, blocks[-1][offset : offset + nbytes]))
            offset += _aligned(nbytes)
    return found
