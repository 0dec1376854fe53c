"""Products with quantized weights, compiled for several kinds of CPU: the same bits from every code that this one can run."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from ctypes import byref
from functools import cache

import pytest
import torch

from superfluid_core.engine.torch.native import build
from superfluid_core.engine.torch.native.build import own_folder
from superfluid_core.engine.torch.quantized import QuantizedMatrix, pack, to_int8
from superfluid_core.engine.torch.small_step import ROWS_MAX, RowsRoom, describe_matrix
from tests.unit.engine_torch.native import cache_folder, ops, to_int4

PLAIN = "-DPLAIN_VECTORS"
NEEDED = {"avx2", "fma", "f16c", "bmi2", "movbe"}  # of x86-64-v3, what some CPUs with vectors lack
COUNTS = (*range(1, 10), 11, 15, 16, 17, 31, ROWS_MAX)
needs_avx2 = pytest.mark.skipif(
    not set(build.cpu_features().split()) >= NEEDED or shutil.which("g++") is None,
    reason="this CPU has no AVX2, or there is no g++ that makes code for it",
)


@cache
def compiled(machine: str, *more: str) -> ctypes.CDLL:
    """The products alone, for a kind of CPU."""
    source = build.SOURCES / "calls.h"
    flags = [flag for flag in build.FLAGS if not flag.startswith("-march")]
    command = ["g++", *flags, f"-march={machine}", *more, "-x", "c++", str(source)]
    name = hashlib.sha256(" ".join((build.build_key(), *command)).encode()).hexdigest()[:24]
    path = own_folder(cache_folder() / "alike") / f"{name}.so"
    if not path.exists():
        draft = path.with_suffix(f".{id(command)}")
        subprocess.run([*command, "-o", str(draft)], check=True, timeout=100)
        draft.replace(path)
    return ctypes.CDLL(str(path))


def product(library: ctypes.CDLL, x: torch.Tensor, matrix: QuantizedMatrix) -> torch.Tensor:
    room = RowsRoom(*x.shape)
    out = torch.empty((x.shape[0], matrix.outputs))
    library.superfluid_quantize(ctypes.c_void_p(x.data_ptr()), byref(room.described), *x.shape)
    library.superfluid_product(
        byref(describe_matrix(matrix)),
        byref(room.described),
        ctypes.c_void_p(out.data_ptr()),
        x.shape[0],
    )
    return out


def random_matrix(kind: int) -> QuantizedMatrix:
    """70 outputs, which is no whole number of tiles; three of them stand at either end of what a weight can be."""
    g = torch.Generator().manual_seed(kind)
    weight, bias = torch.randn(70, 96, generator=g), torch.randn(70, generator=g)
    rows = to_int4(weight) if kind == 4 else to_int8(weight)
    rows.q[0] = 0
    rows.q[1] = 15 if kind == 4 else 255
    rows.q[2, ::2], rows.q[2, 1::2] = 0, 15 if kind == 4 else 255
    return pack([rows], bias)


def extreme_rows(count: int) -> torch.Tensor:
    """Random activations; in some rows groups that are all as large as can be, of one sign or both, or all zero."""
    x = torch.randn(count, 96, generator=torch.Generator().manual_seed(count))
    x[0, :32], x[0, 32:64] = 3.5, -3.5
    x[count // 2, ::2], x[count // 2, 1::2] = 2.0, -2.0
    x[-1, 64:] = 0
    return x


@needs_avx2
@pytest.mark.parametrize("kind", [4, 8])
def test_avx2_gives_the_bits_of_plain_vectors(kind: int) -> None:
    matrix = random_matrix(kind)
    pairs, plain = compiled("x86-64-v3"), compiled("x86-64-v3", PLAIN)
    for count in COUNTS:
        x = extreme_rows(count)
        found = product(pairs, x, matrix)
        assert torch.equal(found, product(plain, x, matrix)), f"{count} rows"
        for row in (0, count - 1):
            assert torch.equal(product(pairs, x[row : row + 1].contiguous(), matrix)[0], found[row])


@needs_avx2
@pytest.mark.parametrize("kind", [4, 8])
def test_the_library_of_this_cpu_gives_the_bits_of_avx2(kind: int) -> None:
    matrix = random_matrix(kind)
    for count in COUNTS:
        x, room = extreme_rows(count), RowsRoom(count, 96)
        ops().quantize(x, room.described)
        found = ops().product(describe_matrix(matrix), room.described, count)
        assert torch.equal(found, product(compiled("x86-64-v3"), x, matrix)), f"{count} rows"


@needs_avx2
@pytest.mark.parametrize("kind", [4, 8])
def test_a_cpu_without_avx_has_code_of_its_own(kind: int) -> None:
    matrix, x = random_matrix(kind), extreme_rows(9)
    found, wanted = [product(compiled(machine), x, matrix) for machine in ("x86-64-v2", "x86-64-v3")]  # fmt: skip
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-4)
