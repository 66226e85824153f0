"""The safetensors files of a checkpoint folder, as engines load them at launch."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open


def safetensors_files(folder: Path) -> list[Path]:
    """The files in the order of their names; those of the index if there is one. Empty without any."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))


def stream(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor, read when it is asked for."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict: it cannot be iterated
                yield name, opened.get_tensor(name)


def headers(files: Sequence[Path]) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of every tensor, without reading them."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - as above
                part = opened.get_slice(name)
                shape = tuple(part.get_shape())
                yield name, shape, (part[:0] if shape else opened.get_tensor(name)).dtype
