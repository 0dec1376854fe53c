"""Safetensors whose matrices were quantized before they were published, as if they were plain ones, or as they are.

Owns which tensors a name stands for. `get` writes numbers out, so that whatever reads plain checkpoints reads these; `rows` gives the
quantized rows of the same matrix in the same order, for products that take them. What a file leaves plain (embeddings, norms, often
the head) goes through untouched: a matrix is quantized where its packed tensor is there, or where it is of 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from superfluid_core.engine.torch.compressed.affine import Affine, mlx_shape, read_mlx
from superfluid_core.engine.torch.compressed.floats8 import Floats8, read_fp8
from superfluid_core.engine.torch.compressed.integers import (
    WORD_BITS,
    Integers,
    packed_shape,
    read_awq,
    read_gptq,
    read_int8,
    read_packed,
)
from superfluid_core.engine.torch.compressed.parts import Parts
from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.engine.torch.quantized import QuantizedRows
from superfluid_core.engine.torch.sources import Closing, Entry, Part, SafetensorsSource
from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import ModelConfig
from superfluid_core.modelfiles.quantization import MATRIX, Layout, Quantization, holds_matrix

READERS: dict[Layout, Callable[[Parts], Integers | Floats8 | Affine]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "packed": read_packed,
    "int8": read_int8,
    "fp8": read_fp8,
    "mlx": read_mlx,
}
NEEDED: dict[Layout, tuple[str, ...]] = {
    "awq": ("scales",),
    "gptq": ("scales", "qzeros"),
    "packed": ("weight_scale", "weight_shape"),
    "int8": ("weight_scale",),
    "fp8": (),
    "mlx": (),
}
ZEROS: dict[Layout, tuple[str, ...]] = {
    "awq": ("qzeros",),
    "packed": ("weight_zero_point",),
    "int8": ("weight_zero_point",),
}


class CompressedSource(Closing):
    """A directory of safetensors with quantized matrices; `kept` says how."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        kept: Quantization,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._files = SafetensorsSource(directory, config, device, dtype)
        self._kept, self._dtype = kept, dtype

    def close(self) -> None:
        self._files.close()

    def has(self, name: str) -> bool:
        return self._find(name) is not None or self._files.has(name)

    def get(self, name: str) -> Tensor:
        matrix = self._matrix(name)
        return self._files.get(name) if matrix is None else matrix.floats(self._dtype)

    def rows(self, name: str) -> QuantizedRows | Fp8Rows | None:
        """Find a matrix as the file quantized it, on the source's device; None where it is plain or fits no such rows."""
        matrix = self._matrix(name)
        return None if matrix is None else matrix.rows()

    def entry(self, name: str) -> Entry | None:
        """Say where a matrix lies, and as what, without reading it. Raises ModelFilesError where a part of it is missing."""
        found = self._find(name)
        if found is None:
            return self._files.entry(name)
        parts, part = found
        outputs, inputs = self._shape(parts)
        rows = outputs if part is None else max(0, min(part.end, outputs) - part.first)
        stored = MATRIX[self._kept.layout]
        kind = parts.located(stored).dtype
        return Entry(parts.prefix + stored, kind, (rows, inputs), parts.beside())

    def _shape(self, parts: Parts) -> tuple[int, int]:
        layout, run = self._kept.layout, WORD_BITS // self._kept.bits
        zeros = ZEROS.get(layout, ()) if self._kept.zero_points else ()
        for name in (*NEEDED[layout], *zeros):
            parts.located(name)
        if layout == "packed":
            return packed_shape(parts)
        if layout == "mlx":
            return mlx_shape(parts)
        first, second = parts.matrix(MATRIX[layout])
        if layout in ("int8", "fp8"):
            return first, second
        return (second * run, first) if layout == "awq" else (second, first * run)

    def _matrix(self, name: str) -> Integers | Floats8 | Affine | None:
        found = self._find(name)
        if found is None:
            return None
        parts, part = found
        matrix = READERS[self._kept.layout](parts)
        if part is not None:
            matrix = matrix.cut(part.first, part.end)
        if not self._files.order.changes(name):
            return matrix
        return matrix.reordered(lambda each: self._files.order(name, each))

    def _find(self, name: str) -> tuple[Parts, Part | None] | None:
        """Find the tensors of a quantized matrix, and which of its rows are meant where it is fused."""
        if not name.endswith(".weight"):
            return None
        last = MATRIX[self._kept.layout]
        found = self._files.find(name.removesuffix("weight") + last)
        if found is None:
            if self._kept.layout == "mlx" and ".mlp.experts." in name:
                raise ModelFilesError(
                    f"there is no tensor {name!r}: MLX stacks experts, which --engine mlx alone reads"
                )
            return None
        stored, part = found
        if not holds_matrix(self._kept, stored, self._files.index.locate(stored).dtype):
            return None
        return Parts(self._files, stored.removesuffix(last), self._kept), part
