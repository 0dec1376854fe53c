"""What a GGUF file becomes once it is dequantized and laid out, kept between starts.

Owns the files of `<cache>/weights`: their names, their bound, their validation. A file's name is the hash of everything that it was made
of (the model's path, size, time and first megabyte, the dtype, the version of this layout), so a changed model is another file and a
stale one is never read. Files are safetensors, which cannot execute; they are written under another name and moved. What cannot be kept
is not: a full disk or a model beyond the bound costs a slower start, never an error.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from superfluid_core.engine.torch.quantized import (
    QuantizedLayer,
    QuantizedMatrix,
    QuantizedWeights,
)
from superfluid_core.limits import MIB

LAYOUT = "1"
HEADER_BYTES = MIB
MODEL_BYTES_MAX = 8192 * MIB
CACHE_BYTES_MAX = 16_384 * MIB
FREE_SHARE = 2  # of the disk, so many times the file must be free
PARTS = ("qkv", "out", "gate_up", "down")


def cache_name(path: Path, dtype: torch.dtype) -> str:
    """Name what this model file gives in this dtype."""
    found = path.stat()
    digest = hashlib.sha256()
    about = (LAYOUT, str(path.resolve()), found.st_size, found.st_mtime_ns, dtype)
    digest.update("\0".join(map(str, about)).encode())
    with path.open("rb") as file:
        digest.update(file.read(HEADER_BYTES))
    return f"{digest.hexdigest()[:32]}.safetensors"


class WeightsCache:
    """A bounded directory; the least recently used files go first."""

    def __init__(self, folder: Path, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._folder = folder
        self._bytes_max = bytes_max

    def holds(self, name: str) -> bool:
        """Whether there is a file to read."""
        return (self._folder / name).exists()

    def read(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Tensors and notes of a file, in memory of their own; None when it is not there or is broken."""
        path = self._folder / name
        try:
            with safe_open(path, framework="pt") as file:
                notes = dict(file.metadata() or {})
                tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
            os.utime(path)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError):
            path.unlink(missing_ok=True)
            return None
        return tensors, notes

    def write(self, name: str, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> bool:
        """Keep tensors under `name`; False when there is no room for them."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        draft = self._folder / f"{name}.{os.getpid()}.draft"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if size > MODEL_BYTES_MAX or not self._make_room(size):
                return False
            save_file(dict(tensors), draft, metadata=dict(notes))
            draft.replace(self._folder / name)
        except (OSError, SafetensorError):
            with suppress(OSError):
                draft.unlink()
            return False
        return True

    def _make_room(self, size: int) -> bool:
        if size > self._bytes_max or shutil.disk_usage(self._folder).free < FREE_SHARE * size:
            return False
        files = [(path, path.stat()) for path in self._folder.iterdir()]
        files.sort(key=lambda found: found[1].st_mtime_ns)
        held = sum(found.st_size for _, found in files)
        for path, found in files:
            if held + size <= self._bytes_max:
                break
            path.unlink(missing_ok=True)
            held -= found.st_size
        return True


def flatten(weights: QuantizedWeights) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Quantized weights as named tensors and the sizes that tensors do not tell."""
    tensors: dict[str, Tensor] = {}
    notes: dict[str, str] = {}
    named = {
        f"tiles.{number}.{part}": getattr(layer, part)
        for number, layer in enumerate(weights.layers)
        for part in PARTS
    }
    for name, matrix in (named | {"tiles.head": weights.head}).items():
        tensors[name] = matrix.tiles
        notes[name] = f"{matrix.kind} {matrix.outputs} {matrix.inputs}"
        if matrix.bias is not None:
            tensors[f"{name}.bias"] = matrix.bias
    return tensors, notes


def unflatten(
    tensors: Mapping[str, Tensor], notes: Mapping[str, str], layers: int
) -> QuantizedWeights | None:
    """Undo `flatten`; None when nothing quantized was kept."""

    def matrix(name: str) -> QuantizedMatrix:
        kind, outputs, inputs = map(int, notes[name].split())
        return QuantizedMatrix(tensors[name], kind, outputs, inputs, tensors.get(f"{name}.bias"))

    if "tiles.head" not in tensors:
        return None
    return QuantizedWeights(
        tuple(
            QuantizedLayer(*(matrix(f"tiles.{number}.{part}") for part in PARTS))
            for number in range(layers)
        ),
        matrix("tiles.head"),
    )
