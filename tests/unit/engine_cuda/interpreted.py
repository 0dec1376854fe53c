"""Products of quantized matrices in Triton's interpreter, beside float64: a JSON line a case. Run as a module, with TRITON_INTERPRET=1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.engine.torch.grouped import GroupedMatrix, group_rows, numbers
from superfluid_core.engine.torch.quantized import QuantizedRows, to_int8
from superfluid_core.engine.torch.quantized_linear import Products, QuantizedLinear, Scratch
from superfluid_core.engine.torch.triton.products import TritonProducts, splits_of
from tests.unit.engine_torch.native import to_int4

CPU = torch.device("cpu")
ROWS = (1, 2, 7, 16, 33, 300)
GGUF_SIZES = ((33, 32), (70, 96), (66, 544), (64, 1024))
FP8_SIZES = (
    (70, 200, (128, 128)),
    (66, 300, (64, 128)),
    (50, 333, (1, 333)),
    (70, 90, (70, 90)),
    (66, 576, (32, 64)),
)


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def fp8(outputs: int, inputs: int, block: tuple[int, int]) -> Fp8Rows:
    shape = (-(-outputs // block[0]), -(-inputs // block[1]))
    return Fp8Rows(drawn(outputs, inputs).to(torch.float8_e4m3fn), drawn(*shape).abs() + 0.1, block)


def matrices() -> Iterator[tuple[str, GroupedMatrix]]:
    rows: dict[str, QuantizedRows | Fp8Rows] = {}
    for outputs, inputs in GGUF_SIZES:
        rows[f"int4 {outputs} {inputs}"] = to_int4(drawn(outputs, inputs))
        rows[f"int8 {outputs} {inputs}"] = to_int8(drawn(outputs, inputs))
    for outputs, inputs, block in FP8_SIZES:
        rows[f"fp8 {outputs} {inputs} {block}"] = fp8(outputs, inputs, block)
    for name, each in rows.items():
        made = group_rows(each, CPU)
        assert made is not None
        yield name, made


def case(name: str, matrix: GroupedMatrix, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    """Multiply with and without a bias; how far off, whether every other row is the same again when those between are no numbers."""
    x = (drawn(rows, matrix.inputs) / matrix.inputs**0.5).to(dtype)
    bias = drawn(matrix.outputs).to(dtype) if rows % 2 else None
    products: Products = TritonProducts()
    linear = QuantizedLinear([matrix], bias, products, Scratch(CPU, dtype))
    found = linear(x)
    wanted = x.double() @ numbers(matrix, dtype).double().t()
    wanted = wanted if bias is None else wanted + bias.double()
    off = ((found.double() - wanted).abs() / (1 + wanted.abs())).max()
    spoiled = x.clone()
    spoiled[1::2] = float("nan")
    return {
        "matrix": name,
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows,
        "splits": splits_of(rows, matrix.outputs, matrix.groups),
        "off": float(off),
        "repeats": torch.equal(linear(spoiled)[::2], found[::2]),
    }


def written_out(name: str, matrix: GroupedMatrix, dtype: torch.dtype) -> dict[str, Any]:
    """Write the middle of a matrix out; whether the numbers are those of plain torch, to the bit."""
    room = torch.full((matrix.outputs - 20, matrix.inputs), -7.0, dtype=dtype)
    TritonProducts().dequantize(matrix, 10, room)
    wanted = numbers(matrix, dtype)[10 : 10 + room.shape[0]]
    return {"matrix": name, "written": torch.equal(room, wanted)}


def main() -> None:
    for name, matrix in matrices():
        for dtype in (torch.float32, torch.float16):
            print(json.dumps(written_out(name, matrix, dtype)))
            for rows in ROWS if dtype is torch.float16 else (1, 16, 33):
                print(json.dumps(case(name, matrix, dtype, rows)))


if __name__ == "__main__":
    main()
