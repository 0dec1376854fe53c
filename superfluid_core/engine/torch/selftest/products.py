"""Checks of products by quantized matrices, and how fast they are beside products by the same matrices written out.

Owns the draw of sizes. What is right is said by float64 over the very numbers that the bytes stand for. A row must have the same bits every
time and whatever the rows beside it hold. The speed is of matrices that no cache holds, in turns; its figures at and beyond
DEQUANTIZE_ROWS rows say whether that constant is well chosen for a device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.engine.torch.grouped import GroupedMatrix, numbers
from superfluid_core.engine.torch.keeping import drawn_matrices, unfit_products
from superfluid_core.engine.torch.quantized_linear import (
    DEQUANTIZE_ROWS,
    Products,
    QuantizedLinear,
    Scratch,
)
from superfluid_core.engine.torch.selftest.kernels import Bench
from superfluid_core.engine.torch.selftest.report import Check, Found, LeftOut, near, run_check

ROWS = (1, 7, 16, 33, 100, DEQUANTIZE_ROWS + 44)
SPEED_ROWS = (1, 16, 64, DEQUANTIZE_ROWS, 2 * DEQUANTIZE_ROWS)
SPEED_OUTPUTS, SPEED_INPUTS = 14_336, 4_096
SPEED_BYTES = 256 << 20  # of copies that take turns: more than any cache holds
SPEED_RUNS = 24


def product_checks(bench: Bench) -> Iterator[Check]:
    """Run every check of this seed; the speed with the first seed only, in 16 bits."""
    yield run_check("products of quantized matrices", partial(_products, bench))
    if bench.seed == 1 and bench.dtype is not torch.float32:
        yield run_check("speed of quantized products", partial(_speed, bench))


def _own(bench: Bench) -> Products:
    reason = unfit_products(bench.device, bench.dtype)
    if reason is not None:
        raise LeftOut(reason)
    from superfluid_core.engine.torch.triton.products import TritonProducts

    return TritonProducts()


def _products(bench: Bench) -> str:
    products, source = _own(bench), random.Random(bench.seed)
    outputs = source.randrange(20, 150) if bench.is_small else source.randrange(3_000, 9_000)
    inputs = 32 * (source.randrange(3, 12) if bench.is_small else source.randrange(60, 300))
    matrices = drawn_matrices(bench.device, outputs, inputs, bench.seed)
    bias = bench.noise(outputs * len(matrices))
    linear = QuantizedLinear(matrices, bias, products, Scratch(bench.device, bench.dtype))
    wide = torch.cat([numbers(matrix, bench.dtype) for matrix in matrices]).double()
    said = ""
    for rows in ROWS:
        x = bench.noise(rows, inputs) / (4 * inputs**0.5)
        found = linear(x)
        said = near(found, F.linear(x.double(), wide, bias.double()), bench.bound * 4)
        if not torch.equal(linear(x), found):
            raise Found(f"{rows} rows give other bits the second time")
        if not torch.equal(linear(_other_company(x))[:1], found[:1]):
            raise Found(f"a row of {rows} depends on the others")
    return f"{outputs} x {inputs}: {said}"


def _other_company(x: Tensor) -> Tensor:
    """Leave the first row as it is, and spoil the others."""
    changed = x * 3
    changed[0] = x[0]
    return changed


def _speed(bench: Bench) -> str:
    if bench.is_small:
        raise LeftOut("it needs a CUDA device")
    products = _own(bench)
    scratch = Scratch(bench.device, bench.dtype)
    said = []
    for matrix in drawn_matrices(bench.device, SPEED_OUTPUTS, SPEED_INPUTS):
        copies = _copies(matrix)
        kept: list[Callable[[Tensor], Tensor]] = [
            QuantizedLinear([copy], None, products, scratch) for copy in copies
        ]
        weight = numbers(matrix, bench.dtype)
        plain = [partial(F.linear, weight=weight.clone()) for _ in copies]
        figures = []
        for rows in SPEED_ROWS:
            x = bench.noise(rows, SPEED_INPUTS)
            own, other = _seconds(kept, x), _seconds(plain, x)
            figures.append(f"{rows} rows {own * 1e6:.0f} us, {other / own:.2f} x plain")
        speed = matrix.nbytes / _seconds(kept, bench.noise(1, SPEED_INPUTS)) / 1e9
        said.append(f"{matrix.kind} {speed:.0f} GB/s: {'; '.join(figures)}")
    return " | ".join(said)


def _copies(matrix: GroupedMatrix) -> list[GroupedMatrix]:
    count = -(-SPEED_BYTES // matrix.nbytes)
    return [replace(matrix, q=matrix.q.clone()) for _ in range(count)]


def _seconds(linears: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """Time of one product when the matrices take turns, after a round that is not counted."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch has no hints here
    for linear in linears:
        linear(x)
    first.record()
    for run in range(SPEED_RUNS):
        linears[run % len(linears)](x)
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / SPEED_RUNS
