"""Products of quantized matrices: the layout against the rows it was made of, kernels in the interpreter, and when they are used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from superfluid_core.engine.torch import keeping, quantized_linear
from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.engine.torch.grouped import GroupedMatrix, group_rows, join, numbers
from superfluid_core.engine.torch.keeping import choose_products, drawn_matrices
from superfluid_core.engine.torch.quantized import QuantizedRows, floats, to_int8
from superfluid_core.engine.torch.quantized_linear import (
    DEQUANTIZE_ROWS,
    Keeper,
    QuantizedLinear,
    Scratch,
    TorchProducts,
)
from superfluid_core.errors import ConfigError, ModelFilesError
from tests.unit.engine_torch.native import to_int4

ROOT = Path(__file__).parents[3]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
F32 = torch.float32
BOUNDS = {"float32": 1e-5, "float16": 1e-3}


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def grouped(rows: QuantizedRows | Fp8Rows) -> GroupedMatrix:
    made = group_rows(rows, CPU)
    assert made is not None
    return made


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_interpreted_kernels_multiply_as_float64_does_and_rows_do_not_mix() -> None:
    environment = dict(os.environ) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine_cuda.interpreted"],
        capture_output=True, text=True, timeout=230, check=False, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    written = [line for line in lines if "written" in line]
    products = [line for line in lines if "off" in line]
    assert len(written) == 26
    assert all(line["written"] for line in written)
    assert len(products) == 13 * (6 + 3)
    assert [line for line in products if not line["off"] <= BOUNDS[line["dtype"]]] == []
    assert [line for line in products if not line["repeats"]] == []
    assert {1, 2, 4} <= {line["splits"] for line in products}
    assert {line["rows"] for line in products} == {1, 2, 7, 16, 33, 300}


# --- the layout


@pytest.mark.parametrize("inputs", [32, 96])
def test_a_groups_layout_holds_the_numbers_of_its_rows(inputs: int) -> None:
    for rows in (to_int4(drawn(21, inputs)), to_int8(drawn(21, inputs))):
        assert torch.equal(numbers(grouped(rows), F32), floats(rows))


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 200), (70, 200), (16, 64)])
def test_floats_of_8_bits_are_scaled_block_by_block(block: tuple[int, int]) -> None:
    weight = drawn(70, 200).to(torch.float8_e4m3fn)
    scale = drawn(-(-70 // block[0]), -(-200 // block[1])).abs() + 0.1
    wanted = weight.float()
    for row in range(70):
        for column in range(200):
            wanted[row, column] *= scale[row // block[0], column // block[1]]
    matrix = grouped(Fp8Rows(weight, scale, block))
    assert torch.equal(numbers(matrix, F32), wanted)


def test_every_float_of_8_bits_comes_out_and_what_is_none_is_refused() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    good = bits[(bits & 127) != 127].repeat(2)[:504].view(torch.float8_e4m3fn).reshape(1, -1)
    matrix = grouped(Fp8Rows(good, torch.ones(1, 1), (1, 504)))
    assert torch.equal(numbers(matrix, F32), good.float())
    with pytest.raises(ModelFilesError, match="no number"):
        grouped(Fp8Rows(bits.view(torch.float8_e4m3fn).reshape(1, -1), torch.ones(1, 1), (1, 256)))


def test_blocks_that_cut_through_groups_are_not_kept() -> None:
    weight = drawn(8, 120).to(torch.float8_e4m3fn)
    rows = Fp8Rows(weight, torch.ones(1, 3), (8, 40))
    assert group_rows(rows, CPU) is None
    keeper = Keeper(TorchProducts(), CPU, F32)
    assert keeper.linear([rows], None) is None
    assert keeper.matrices == 0


def test_neighbours_that_are_alike_become_one_matrix_and_the_order_stays() -> None:
    parts = [to_int4(drawn(5, 64)), to_int4(drawn(6, 64)), to_int8(drawn(7, 64))]
    found = join([grouped(rows) for rows in parts])
    assert [(matrix.kind, matrix.outputs) for matrix in found] == [("int4", 11), ("int8", 7)]
    assert torch.equal(
        torch.cat([numbers(matrix, F32) for matrix in found]), torch.cat([floats(r) for r in parts])
    )
    assert join([]) == []


def test_a_kept_matrix_takes_little_more_than_its_bits() -> None:
    sizes = {matrix.kind: matrix.nbytes for matrix in drawn_matrices(CPU, 256, 1024)}
    whole = 256 * 1024
    assert sizes["int4"] == whole * 5 // 8
    assert sizes["int8"] == whole * 17 // 16
    assert whole < sizes["fp8"] <= whole * 17 // 16


# --- a product


@pytest.mark.parametrize("rows", [0, 1, 5, DEQUANTIZE_ROWS + 3])
@pytest.mark.parametrize("is_biased", [False, True])
def test_parts_of_unlike_kinds_make_one_product(
    rows: int, is_biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_linear, "SCRATCH_BYTES_MAX", 64 * 4 * 3)  # slices of 3 outputs
    parts = [to_int4(drawn(11, 64)), to_int8(drawn(6, 64)), to_int8(drawn(9, 64))]
    bias = drawn(26) if is_biased else None
    linear = Keeper(TorchProducts(), CPU, F32).linear(parts, bias)
    assert linear is not None
    x = drawn(rows, 64)
    wanted = torch.nn.functional.linear(x, torch.cat([floats(part) for part in parts]), bias)
    assert torch.allclose(linear(x), wanted, atol=1e-5)


def test_room_is_made_once_and_bounded() -> None:
    scratch = Scratch(CPU, F32)
    small, large = grouped(to_int8(drawn(4, 32))), grouped(to_int8(drawn(40, 64)))
    for matrix in (small, large, small):
        QuantizedLinear([matrix], None, TorchProducts(), scratch)
    [(first, room)] = list(scratch.slices(large))
    assert (first, tuple(room.shape)) == (0, (40, 64))
    again = next(iter(scratch.slices(small)))[1]
    assert again.data_ptr() == room.data_ptr()


# --- when


def test_a_cpu_keeps_nothing_and_says_so_when_it_was_asked_to() -> None:
    said: list[str] = []
    assert choose_products("auto", CPU, F32, said.append) is None
    assert choose_products("dequantized", CUDA, F32, said.append) is None
    assert said == []
    with pytest.raises(ConfigError, match="--weights quantized: it needs a CUDA device"):
        choose_products("quantized", CPU, F32, said.append)
    with pytest.raises(ConfigError, match="none of auto, quantized, dequantized"):
        choose_products("small", CPU, F32, said.append)


def test_a_device_that_fails_the_trial_dequantizes_and_the_operator_hears_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeping, "unfit_products", lambda *_: "it is off by 3 in a trial")
    said: list[str] = []
    assert choose_products("auto", CUDA, F32, said.append) is None
    assert said == ["quantized weights are dequantized: it is off by 3 in a trial"]
    with pytest.raises(ConfigError, match="off by 3"):
        choose_products("quantized", CUDA, F32, said.append)


def test_the_trial_finds_products_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(TorchProducts):
        def multiply(
            self, x: Tensor, matrix: GroupedMatrix, bias: Tensor | None, out: Tensor
        ) -> None:
            super().multiply(x, matrix, None, out)

    assert keeping._difference(TorchProducts(), CPU, F32) < 1e-5
    assert keeping._difference(Wrong(), CPU, F32) > 0.1
    monkeypatch.setattr(keeping, "triton_missing", lambda *_: None)
    monkeypatch.setattr(keeping, "_difference", lambda *_: 0.5)
    assert keeping.unfit_products(CPU, F32) == "it is off by 0.5 in a trial, 0.0001 is allowed"

    def broken(*_: object) -> float:
        raise RuntimeError("no kernel image\nfor this device")

    monkeypatch.setattr(keeping, "_difference", broken)
    assert keeping.unfit_products(CPU, F32) == "RuntimeError: no kernel image"
