"""The tensors that one quantized matrix is made of.

Owns looking them up and holding their types and shapes against what a layout says, so that a file that contradicts itself is refused
with the tensor's name before numbers are taken out of it. It must not know how numbers are packed.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from superfluid_core.engine.torch.sources import SafetensorsSource
from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.quantization import BESIDE, Quantization, Width
from superfluid_core.modelfiles.safetensors import Located

Shape = tuple[int, ...]
WORDS = ("I32", "U32")
FLOATS = ("F16", "BF16", "F32")
SCALES = (*FLOATS, "F8_E8M0")


class Parts:
    """Tensors by the last part of their names; all others belong to the module `prefix`."""

    def __init__(self, files: SafetensorsSource, prefix: str, kept: Quantization) -> None:
        self._files = files
        self.prefix = prefix
        self.kept = kept

    def has(self, part: str) -> bool:
        return self.prefix + part in self._files.index.tensors

    def located(self, part: str) -> Located:
        return self._files.index.locate(self.prefix + part)

    def shape(self, part: str) -> Shape:
        return self.located(part).shape

    def matrix(self, part: str) -> tuple[int, int]:
        """Give the shape of a tensor that has two dimensions."""
        shape = self.shape(part)
        if len(shape) != 2 or not all(shape):
            raise self.refusal(part, f"is {shape}, not a matrix")
        return shape[0], shape[1]

    def width(self) -> Width:
        """Say how this very matrix was packed, where modules may differ."""
        return self.kept.width(self.prefix.removesuffix("."))

    def beside(self) -> tuple[str, ...]:
        """Name what belongs to the matrix, as the file does."""
        return tuple(self.prefix + part for part in BESIDE[self.kept.layout] if self.has(part))

    def take(self, part: str, types: tuple[str, ...], *shapes: Shape) -> Tensor:
        """Read a tensor of one of these types and shapes."""
        place = self.located(part)
        if place.dtype not in types:
            raise self.refusal(part, f"is of type {place.dtype}, not {' or '.join(types)}")
        if place.shape not in shapes:
            wanted = " or ".join(map(str, dict.fromkeys(shapes)))
            raise self.refusal(part, f"is {place.shape}, its neighbours say {wanted}")
        return self._files.read(self.prefix + part)

    def sizes(self, part: str) -> tuple[int, int]:
        """Read two sizes that a file keeps as a tensor; also where no device holds numbers."""
        place = self.located(part)
        width = {"I64": "q", "I32": "i"}.get(place.dtype)
        if width is None or place.shape != (2,):
            raise self.refusal(part, f"is {place.dtype} {place.shape}, not two sizes")
        try:
            with place.path.open("rb") as file:
                file.seek(place.start)
                first, second = struct.unpack(f"<2{width}", file.read(place.end - place.start))
        except (OSError, struct.error) as error:
            raise ModelFilesError(f"{place.path.name}: {error}") from error
        return first, second

    def index(self, part: str, inputs: int, groups: int) -> Tensor | None:
        """Read the group of each input; None where the file does not tell."""
        if not self.has(part):
            return None
        found = self.take(part, ("I32", "I64"), (inputs,)).long()
        if bool((found == -1).all()):  # how compressed-tensors says that none was set
            return None
        if bool(((found < 0) | (found >= groups)).any()):
            raise self.refusal(part, f"names a group that is not one of {groups}")
        return found

    def refusal(self, part: str, what: str) -> ModelFilesError:
        return ModelFilesError(f"tensor {self.prefix + part!r} {what}")


def in_order(inputs: int, group: int, device: torch.device) -> Tensor:
    """Give the group of each input where they lie in order."""
    return torch.arange(inputs, device=device) // group
