"""Products by matrices that stay as their file quantized them.

Owns what a product does by the number of its rows, and the room that all of them share. Few rows are multiplied by a kernel that reads
the quantized bytes; many rows first have the matrix written out, a slice of outputs at a time, and are multiplied by torch. Both read the
same numbers, those of the dequantized matrix rounded to the dtype of the rows; only sums are added up in another order.

How a row is computed follows from the class of the number of rows (triton/products.py has 16, 32, 64, any up to DEQUANTIZE_ROWS) and from the
sizes of the matrix, never from what other rows hold, and no sum is left to chance: the same rows give the same bits every time.
Batch-invariant lanes compute whole tiles of invariant.TILE_ROWS rows and one row of the head, so a matrix always meets one class here;
`InvariantForward.holds` tries that on the loaded weights, these included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.engine.torch.grouped import GroupedMatrix, group_rows, join, numbers
from superfluid_core.engine.torch.quantized import QuantizedRows

# Part of the numbers: see CODE_VERSION. Beyond it, writing a matrix out costs less than unpacking it once for every 64 rows; `superfluid
# selftest` measures both ways on either side.
DEQUANTIZE_ROWS = 256
SCRATCH_BYTES_MAX = 256 << 20
WARM_ROWS = (1, 17, 33, 65, DEQUANTIZE_ROWS + 1)  # one number of rows of every class


class Products(Protocol):
    """Something that multiplies by grouped matrices. Waits for no device and keeps no memory."""

    def multiply(self, x: Tensor, matrix: GroupedMatrix, bias: Tensor | None, out: Tensor) -> None:
        """Write x @ matrix.T + bias into `out` [rows, outputs], whose rows may lie apart. `x` is contiguous."""
        ...

    def dequantize(self, matrix: GroupedMatrix, first: int, room: Tensor) -> None:
        """Write the numbers of the outputs from `first` on into `room` [outputs, inputs], as many as it takes."""
        ...


class TorchProducts:
    """The same in plain torch, slow and anywhere: what others are held against."""

    def multiply(self, x: Tensor, matrix: GroupedMatrix, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(F.linear(x, numbers(matrix, x.dtype), bias))

    def dequantize(self, matrix: GroupedMatrix, first: int, room: Tensor) -> None:
        room.copy_(numbers(matrix, room.dtype)[first : first + room.shape[0]])


class Scratch:
    """Room for a matrix that is written out, or a slice of one; made before steps are, shared by all layers of a step."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._room = torch.empty(0, dtype=dtype, device=device)

    def reserve(self, matrix: GroupedMatrix) -> None:
        """Grow so that the matrix, or a bounded slice of it, fits."""
        most = max(SCRATCH_BYTES_MAX // self._room.itemsize, matrix.inputs)
        wanted = min(matrix.outputs * matrix.inputs, most)
        if wanted > self._room.numel():
            self._room = self._room.new_empty(wanted)

    def slices(self, matrix: GroupedMatrix) -> Iterator[tuple[int, Tensor]]:
        """Cut the outputs up: the first of each slice, and the room for it, which is that of the slice before."""
        each = self._room.numel() // matrix.inputs
        for first in range(0, matrix.outputs, each):
            count = min(each, matrix.outputs - first)
            yield first, self._room[: count * matrix.inputs].view(count, matrix.inputs)


class QuantizedLinear:
    """x @ weight.T + bias, the outputs of several matrices side by side."""

    __slots__ = ("_outputs", "_parts", "_products", "_scratch")

    def __init__(
        self,
        matrices: Sequence[GroupedMatrix],
        bias: Tensor | None,
        products: Products,
        scratch: Scratch,
    ) -> None:
        self._products = products
        self._scratch = scratch
        self._parts: list[tuple[GroupedMatrix, Tensor | None, slice]] = []
        first = 0
        for matrix in join(matrices):
            scratch.reserve(matrix)
            place = slice(first, first + matrix.outputs)
            own = None if bias is None else bias[place].contiguous()
            self._parts.append((matrix, own, place))
            first = place.stop
        self._outputs = first

    @property
    def sizes(self) -> tuple[object, ...]:
        """Say what kernels are compiled for."""
        return tuple(
            (matrix.kind, matrix.outputs, matrix.inputs, matrix.scale_groups, bias is None)
            for matrix, bias, _ in self._parts
        )

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = x.new_empty((rows, self._outputs))
        if not rows:
            return out
        x = x.contiguous()
        for matrix, bias, place in self._parts:
            own = out[:, place]
            if rows <= DEQUANTIZE_ROWS:
                self._products.multiply(x, matrix, bias, own)
            else:
                self._written_out(x, matrix, bias, own)
        return out

    def _written_out(
        self, x: Tensor, matrix: GroupedMatrix, bias: Tensor | None, out: Tensor
    ) -> None:
        for first, room in self._scratch.slices(matrix):
            self._products.dequantize(matrix, first, room)
            own = slice(first, first + room.shape[0])
            if bias is None:
                torch.mm(x, room.t(), out=out[:, own])
            else:
                torch.addmm(bias[own], x, room.t(), out=out[:, own])


class Keeper:
    """Makes products of the matrices of a model that are to stay as they are; counts them."""

    def __init__(self, products: Products, device: torch.device, dtype: torch.dtype) -> None:
        self._products = products
        self._device = device
        self._dtype = dtype
        self._scratch = Scratch(device, dtype)
        self._made: dict[tuple[object, ...], tuple[QuantizedLinear, int]] = {}
        self.matrices = 0
        self.bytes = 0

    def linear(
        self, parts: Sequence[QuantizedRows | Fp8Rows], bias: Tensor | None
    ) -> QuantizedLinear | None:
        """Stack the rows of several matrices into one product; None where one of them has to be dequantized."""
        grouped = []
        for rows in parts:
            matrix = group_rows(rows, self._device)
            if matrix is None:
                return None
            grouped.append(matrix)
        self.matrices += len(grouped)
        self.bytes += sum(matrix.nbytes for matrix in grouped)
        made = QuantizedLinear(grouped, bias, self._products, self._scratch)
        self._made.setdefault(made.sizes, (made, grouped[0].inputs))
        return made

    def warm(self) -> None:
        """Run a product of every size once for every class of rows: no request waits for a compiler."""
        for linear, inputs in self._made.values():
            for rows in WARM_ROWS:
                linear(torch.zeros((rows, inputs), dtype=self._dtype, device=self._device))
