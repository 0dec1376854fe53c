"""Steps of many rows by AVX2 against the plain decoder in float32, and a row against itself in other company."""

from __future__ import annotations

import pytest
import torch

from superfluid_core.engine.torch.attention.cpu import CpuAttention
from superfluid_core.engine.torch.attention.padded import PaddedAttention
from superfluid_core.engine.torch.many_rows import ManyRows, fits_many
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.engine.torch.quantized import assemble_quantized, floats, pack
from superfluid_core.engine.torch.small_step import RowsRoom, describe_matrix
from tests.unit.engine_torch.native import (
    VARIANTS,
    TinySource,
    attention_shape,
    make_batch,
    ops,
    tiny_config,
    tiny_decoder,
    tiny_pool,
    to_int4,
)

STEPS = {
    "one prompt": [(0, 70, False)],
    "decoding beside chunks": [(30, 1, True), (0, 50, False), (4, 3, False), (18, 21, False)],
}
needs_pairs = pytest.mark.skipif(ops().many_block == 0, reason="this CPU has better products")


def many_rows(variant: str, threads: int = 1, int8: tuple[str, ...] = ("embed",)) -> ManyRows:
    config = tiny_config(variant)
    source = TinySource(config, int8=int8)
    quantized = assemble_quantized(source, config)
    assert quantized is not None
    decoder = tiny_decoder(source, config, torch.float32)
    assert fits_many(decoder, ops(threads))
    assert not fits_many(tiny_decoder(source, config, torch.bfloat16), ops(threads))
    return ManyRows(decoder, ops(threads), quantized)


@needs_pairs
@pytest.mark.parametrize("int8", [("embed",), ("embed", "proj")])
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_step_of_many_rows_equals_the_plain_one(
    variant: str, step: str, int8: tuple[str, ...]
) -> None:
    many, batch = many_rows(variant, int8=int8), make_batch(STEPS[step])
    config = many.config
    pools = [tiny_pool(config, torch.float32) for _ in range(2)]
    shape = attention_shape(config)
    with torch.inference_mode():
        wanted = Decoder(config, many.weights).forward(batch, PaddedAttention(pools[0], shape))
        native = CpuAttention(pools[1], shape, ops(), config.norm_eps)
        found = many.forward(batch, native)
    assert (found - wanted).abs().max() <= 3e-3 * wanted.std()


@needs_pairs
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_a_product_of_many_rows_has_the_bits_of_a_small_steps(count: int, threads: int) -> None:
    g = torch.Generator().manual_seed(count)
    rows = to_int4(torch.randn(70, 96, generator=g))
    matrix, x = pack([rows], torch.randn(70, generator=g)), torch.randn(count, 96, generator=g)
    found = many_rows("llama", threads)._product(x, matrix)
    assert torch.allclose(found, x @ floats(rows).T + matrix.bias[:70], atol=1e-2)  # type: ignore[index] # it has one
    for row in {0, count // 2, count - 1}:
        room, one = RowsRoom(1, 96), x[row : row + 1].contiguous()
        ops().quantize(one, room.described)
        assert torch.equal(ops().product(describe_matrix(matrix), room.described, 1)[0], found[row])


@needs_pairs
def test_a_row_that_is_not_finite_harms_no_other() -> None:
    g = torch.Generator().manual_seed(1)
    matrix, x = pack([to_int4(torch.randn(32, 64, generator=g))]), torch.randn(40, 64, generator=g)
    x[7, 3] = float("nan")
    finite = many_rows("llama")._product(x, matrix).isfinite().all(1)
    assert finite.tolist() == [row != 7 for row in range(40)]
