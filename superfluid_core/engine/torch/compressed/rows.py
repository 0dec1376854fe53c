"""The rows of a matrix that was published in 8-bit floats."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix as E4M3 floats and the scales of its blocks: number = weight * scale of the block that it lies in.

    weight  float8_e4m3fn [outputs, inputs]
    scale   float32 [ceil(outputs / block[0]), ceil(inputs / block[1])]
    block   rows and columns that share a scale; (outputs, inputs) for one scale a tensor, (1, inputs) for one a row
    """

    weight: Tensor
    scale: Tensor
    block: tuple[int, int]
