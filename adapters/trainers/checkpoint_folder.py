"""A folder of safetensors as it lies on disk: which file has which tensor, and everything that can be wrong with it."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wsync.adapters.trainers.names import WRAPPER_CHILDREN
from wsync.errors import ConfigError, MismatchError, UnsupportedError, first_five

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")

Stamp = tuple[int, int, int]
"""Inode, size in bytes and time of the last change, in ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of the checkpoint."""

    file: Path
    name: str
    """In the file."""


def find_files(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of `folder`, each with the names that the index gives it; None if there is no index.

    Raises:
        ConfigError: there is no such folder.
        UnsupportedError: it holds no safetensors, or an adapter without a model.
        MismatchError: its index cannot be read, names files that are not there, or lies beside a single file.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder; pass the folder of a safetensors checkpoint. A model of a hub must be downloaded "
            f"first"
        )
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        if single.is_file():
            raise MismatchError(f"{folder} has both {_SINGLE} and {_INDEX}; remove the one that is out of date")
        return _by_index(index)
    if single.is_file():
        return {single: None}
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"{folder} holds a LoRA adapter and no model; load it onto its base model with peft, and pass that"
        )
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise UnsupportedError(
            f"{folder} holds {first_five(pickled)}, which may run code when they are read; load the model and save it "
            f"again with save_pretrained(), which writes safetensors"
        )
    raise UnsupportedError(f"{folder} has neither {_SINGLE} nor {_INDEX}")


def _by_index(index: Path) -> dict[Path, set[str] | None]:
    try:
        places: Mapping[str, Any] = json.loads(index.read_text())["weight_map"]
        files: dict[Path, set[str] | None] = {}
        for name, file in places.items():
            if Path(file).name != file:
                raise MismatchError(f"{index} puts {name!r} into {file!r}, which is no file of its folder")
            names = files.setdefault(index.parent / file, set())
            assert names is not None
            names.add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, MismatchError):
            raise
        raise MismatchError(f"{index} is no index of safetensors: {type(error).__name__}: {error}") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise MismatchError(f"{index} names {len(missing)} file(s) that are not there: {first_five(missing)}")
    return files


def entries(folder: Path) -> dict[str, Entry]:
    """Every tensor by its engine-side name, in the order of files and names. Reads headers only.

    Raises as `find_files`, and `MismatchError` for files that are damaged, for names that are missing in a file or
    not in the index, and for names that come twice.
    """
    found: dict[str, Entry] = {}
    for file, indexed in sorted(find_files(folder).items()):
        with opened(file) as tensors:
            names = list(tensors.keys())
        lost, extra = sorted((indexed or set(names)) - set(names)), sorted(set(names) - (indexed or set(names)))
        if lost or extra:
            raise MismatchError(
                f"{file} does not fit its index: {len(lost)} tensors are not in it ({first_five(lost) or 'none'}), "
                f"{len(extra)} are not in the index ({first_five(extra) or 'none'})"
            )
        for name in names:
            known = found.setdefault(engine_name(name), Entry(file=file, name=name))
            if (known.file, known.name) != (file, name):
                raise MismatchError(
                    f"{engine_name(name)} comes twice: as {known.name!r} in {known.file} and as {name!r} in {file}"
                )
    return found


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """`safetensors.safe_open`. Raises `MismatchError` for a file that is damaged or gone."""
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.is_file() else 0
        raise MismatchError(
            f"{file} ({size} bytes) is no complete safetensors file: {error}; was its writer still at work, or ended?"
        ) from error
    with handle as tensors:
        yield tensors


def mapped(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor by its engine-side name, as a private mapping of its file: bytes are read when they are used."""
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for clean, entry in entries(folder).items():
        by_file.setdefault(entry.file, []).append((clean, entry.name))
    found: dict[str, torch.Tensor] = {}
    for file, names in by_file.items():
        with opened(file) as tensors:
            found |= {clean: tensors.get_tensor(name) for clean, name in names}
    return found


def engine_name(name: str) -> str:
    """`name` without what wrappers of DDP, `torch.compile`, FSDP1 and activation checkpointing add to it."""
    parts = [part for part in name.split(".") if part not in WRAPPER_CHILDREN]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


def stamps(files: Sequence[Path]) -> dict[Path, Stamp | None]:
    """What changes when a file is written again; None for one that is gone."""
    found: dict[Path, Stamp | None] = {}
    for file in files:
        try:
            stat = os.stat(file)
            found[file] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        except OSError:
            found[file] = None
    return found


def is_tied(folder: Path) -> bool:
    """Whether the model's configuration says that its head is its embedding."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return bool(config.get("tie_word_embeddings", False))
    except (OSError, ValueError, AttributeError):
        return False
