"""The compiled CPU path against plain torch: every op, the products, whole steps, and what happens when there is no compiler."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.clock import SystemClock
from superfluid_core.engine.torch.attention.cpu import CHUNK_ROWS_MAX, CpuAttention, short_spans
from superfluid_core.engine.torch.attention.padded import PaddedAttention
from superfluid_core.engine.torch.attention.reference import ReferenceAttention
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.forward import Surrounding, make_compiled
from superfluid_core.engine.torch.native import build
from superfluid_core.engine.torch.native.build import NoNativeError, build_key, library
from superfluid_core.engine.torch.native.ops import fits, load_native
from superfluid_core.engine.torch.native_decoder import NativeDecoder
from superfluid_core.engine.torch.quantized import assemble_quantized, floats, pack, to_int8
from superfluid_core.engine.torch.rope import rotate
from superfluid_core.engine.torch.small_step import (
    ROWS_MAX,
    SPAN,
    RowsRoom,
    SmallStep,
    describe_matrix,
)
from tests.unit.engine_torch.native import (
    VARIANTS,
    TinySource,
    attention_shape,
    cache_folder,
    make_batch,
    ops,
    tiny_config,
    tiny_decoder,
    tiny_pool,
    to_int4,
)

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
DTYPES = st.sampled_from(list(BOUNDS))
SEEDS = st.integers(0, 2**31)
STEPS = {
    "decode": [(5, 1, True), (40, 1, True), (0, 1, True), (15, 1, True), (16, 1, True)],
    "short chunks": [(9, 1, True), (3, 7, False), (0, 12, False)],
    "long chunk": [(30, 1, True), (0, 50, False), (4, 3, False), (18, 21, False)],
    "long contexts": [(SPAN + 90, 1, True), (SPAN - 1, 1, True), (SPAN, 2, False)],
}


def close(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> bool:
    return torch.allclose(found.float(), wanted.float(), atol=bound, rtol=bound)


@settings(max_examples=25, deadline=None)
@given(DTYPES, SEEDS, st.integers(1, 40), st.integers(1, 20), st.booleans())
def test_add_and_norm_equal_torchs(
    dtype: torch.dtype, seed: int, rows: int, sixteens: int, adds: bool
) -> None:
    g, width = torch.Generator().manual_seed(seed), 16 * sixteens
    x, delta = torch.randn(2, rows, width, generator=g).to(dtype)
    weight = torch.randn(width, generator=g).to(dtype)
    summed = x + delta if adds else x.clone()
    found = ops().add_norm(x, delta if adds else None, weight, 1e-5)
    assert torch.equal(x, summed)
    assert close(found, F.rms_norm(summed, (width,), weight, 1e-5), BOUNDS[dtype])


@settings(max_examples=25, deadline=None)
@given(DTYPES, SEEDS, st.integers(1, 40), st.integers(1, 20))
def test_silu_times_up_equals_torchs(
    dtype: torch.dtype, seed: int, rows: int, sixteens: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(rows, 32 * sixteens, generator=g) * 20).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert close(ops().silu_times(gate_up), F.silu(gate) * up, BOUNDS[dtype])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38, -200.0, 200.0])
def test_odd_numbers_pass_as_in_torch(value: float) -> None:
    gate_up = torch.full((1, 32), value)
    gate_up[:, 16:] = 1.0
    wanted = F.silu(gate_up[:, :16])
    assert torch.allclose(ops().silu_times(gate_up), wanted, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_turning_storing_and_attending_equal_the_reference(
    variant: str, step: str, dtype: torch.dtype
) -> None:
    config, batch = tiny_config(variant), make_batch(STEPS[step])
    both, g = config.heads + config.kv_heads, torch.Generator().manual_seed(11)
    qkv = torch.randn(batch.tokens, both + config.kv_heads, config.head_dim, generator=g).to(dtype)
    angles = torch.randn(batch.tokens, config.head_dim // 2, generator=g)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)
    norm = (1 + 0.2 * torch.randn(both, config.head_dim, generator=g)).to(dtype)
    turned = F.rms_norm(qkv[:, :both], (config.head_dim,), None, config.norm_eps) * norm
    turned = rotate(turned, cos.unsqueeze(1), sin.unsqueeze(1))
    pools = [tiny_pool(config, dtype) for _ in range(2)]
    reference = ReferenceAttention(pools[0], attention_shape(config))
    reference.plan(batch)
    wanted = reference.run(1, turned[:, : config.heads], turned[:, config.heads :], qkv[:, both:])
    native = CpuAttention(pools[1], attention_shape(config), ops(), config.norm_eps)
    native.plan(batch)
    found = native.run_qkv(1, qkv.clone(), (cos, sin), norm)
    assert close(found, wanted, BOUNDS[dtype])
    assert close(pools[1].keys[1], pools[0].keys[1], BOUNDS[dtype])
    assert torch.equal(pools[1].values[1], pools[0].values[1])
    assert torch.equal(pools[1].keys[0], pools[0].keys[0])
    plain = native.run(1, turned[:, : config.heads], turned[:, config.heads :], qkv[:, both:])
    assert close(plain, wanted, BOUNDS[dtype])


def test_long_chunks_are_left_to_torch_and_all_else_is_one_span() -> None:
    batch = make_batch([(9, 1, True), (3, 1, True), (0, 5, False), (0, 40, False), (2, 3, False)])
    assert CHUNK_ROWS_MAX < 40
    assert short_spans(batch) == [(0, 7), (47, 50)]


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 70), st.integers(1, 6), st.integers(1, 19), st.booleans())
def test_quantized_products_equal_products_of_their_numbers(
    seed: int, outputs: int, groups: int, count: int, is_int8: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, 32 * groups, generator=g)
    rows = to_int8(weight) if is_int8 else to_int4(weight)
    bias = torch.randn(outputs, generator=g)
    matrix, room = pack([rows], bias), RowsRoom(count, 32 * groups)
    x = torch.randn(count, 32 * groups, generator=g) * 10
    ops().quantize(x, room.described)
    found = ops().product(describe_matrix(matrix), room.described, count)
    wanted = F.linear(x.double(), floats(rows).double())
    size = x.abs().amax() * floats(rows).abs().sum(1).amax()
    assert ((found - bias).double() - wanted).abs().max() <= 2e-5 * size + 1e-6


@pytest.mark.parametrize("groups", [1, 2, 7])
@pytest.mark.parametrize("is_int8", [True, False])
def test_a_products_row_is_bit_by_bit_the_same_among_any_number_of_rows(
    is_int8: bool, groups: int
) -> None:
    """One row is multiplied by vectors, several by AMX where the CPU has it: 8, 16 and the odd numbers between."""
    weight = torch.randn(37, 32 * groups, generator=torch.Generator().manual_seed(groups))
    matrix = pack([to_int8(weight) if is_int8 else to_int4(weight)], torch.randn(37))
    x = torch.randn(ROWS_MAX, 32 * groups, generator=torch.Generator().manual_seed(9))

    def product(rows: torch.Tensor) -> torch.Tensor:
        room = RowsRoom(len(rows), 32 * groups)
        ops().quantize(rows, room.described)
        return ops().product(describe_matrix(matrix), room.described, len(rows))

    alone = torch.cat([product(x[at : at + 1].clone()) for at in range(ROWS_MAX)])
    for count in range(1, ROWS_MAX + 1):
        assert torch.equal(product(x[:count]), alone[:count]), count


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_int8", [True, False])
def test_a_row_that_is_not_finite_gives_nothing_finite_and_harms_no_other(
    value: float, is_int8: bool
) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    matrix = pack([to_int8(weight) if is_int8 else to_int4(weight)])
    room, x = RowsRoom(3, 64), torch.ones(3, 64)
    x[1, 40] = value
    ops().quantize(x, room.described)
    found = ops().product(describe_matrix(matrix), room.described, 3)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


def both_steps(variant: str, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, Any, Any]:
    """Logits and pool of the plain decoder, and a small step over the same weights with a pool of its own."""
    config = tiny_config(variant)
    source = TinySource(config)
    decoder = tiny_decoder(source, config, dtype)
    quantized = assemble_quantized(source, config)
    assert quantized is not None
    pools = [tiny_pool(config, dtype) for _ in range(2)]
    wanted = decoder.forward(batch, PaddedAttention(pools[0], attention_shape(config)))
    return wanted, (decoder, pools), SmallStep(ops(), decoder, quantized, pools[1])


@pytest.mark.parametrize("step", ["decode", "short chunks", "long contexts"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_small_step_over_quantized_weights_equals_the_plain_one(variant: str, step: str) -> None:
    batch = make_batch(STEPS[step])
    with torch.inference_mode():
        wanted, (_, pools), small = both_steps(variant, batch, torch.float32)
        assert small.takes(batch)
        found = small.forward(batch)
    assert close(found, wanted, 3e-3 * float(wanted.std()))
    for mine, plain in zip((*pools[1].keys, *pools[1].values), (*pools[0].keys, *pools[0].values), strict=True):  # fmt: skip
        assert close(mine, plain, 3e-3)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_compiled_decoder_equals_the_plain_one(
    variant: str, step: str, dtype: torch.dtype
) -> None:
    config, batch = tiny_config(variant), make_batch(STEPS[step])
    with torch.inference_mode():
        decoder = tiny_decoder(TinySource(config), config, dtype)
        shape = attention_shape(config)
        wanted = decoder.forward(batch, PaddedAttention(tiny_pool(config, dtype), shape))
        native = CpuAttention(tiny_pool(config, dtype), shape, ops(), config.norm_eps)
        found = NativeDecoder(decoder, ops()).forward(batch, native)
    bound = 1e-4 if dtype is torch.float32 else 0.1
    assert (found - wanted).abs().max() <= bound * wanted.std()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_numbers_depend_neither_on_company_nor_on_threads(threads: int) -> None:
    config = tiny_config("llama")
    source = TinySource(config)
    lanes = [(20 + n, 1, True) for n in range(ROWS_MAX)]
    crowd = make_batch(lanes)
    with torch.inference_mode():
        decoder = tiny_decoder(source, config, torch.float32)
        quantized = assemble_quantized(source, config)
        assert quantized is not None
        alone, together = [
            SmallStep(ops(n), decoder, quantized, tiny_pool(config, torch.float32))
            for n in (1, threads)
        ]
        many = together.forward(crowd)
        for number in (0, 3, ROWS_MAX - 1):
            one = Batch(
                ids=crowd.ids[number : number + 1],
                positions=crowd.positions[number : number + 1],
                slots=crowd.slots[number : number + 1],
                sampled=torch.tensor([0]),
                tables=crowd.tables[number : number + 1],
                blocks=crowd.blocks[number : number + 1],
                decodes=1,
                lengths=(1,),
                starts=(0, 1),
                contexts=crowd.contexts[number : number + 1],
                fresh=(),
            )
            assert torch.equal(alone.forward(one)[0], many[number])


def test_logits_of_a_lane_whose_context_holds_a_nan_are_not_finite_and_others_are() -> None:
    batch = make_batch([(20, 1, True), (21, 1, True)])
    with torch.inference_mode():
        _, (_, pools), small = both_steps("llama", batch, torch.float32)
        pools[1].keys[0][batch.blocks[0][0], 3] = float("nan")
        found = small.forward(batch)
    assert not found[0].isfinite().all()
    assert found[1].isfinite().all()


# --- the whole engine


def test_batch_invariant_plans_and_embeddings_never_take_a_compiled_path(
    tiny: Callable[[str], tuple[Path, Any]], build_engine: Callable[..., TorchEngine]
) -> None:
    path, _ = tiny("qwen2")
    ops()
    plain = build_engine(path)
    compiled = build_engine(path, cache_dir=cache_folder())
    assert "C++ ops" in compiled.describe().engine_build
    taken: list[int] = []
    forward = compiled._paths.compiled
    assert forward is not None

    def count(batch: Batch) -> torch.Tensor:
        taken.append(batch.tokens)
        return forward(batch)

    compiled._paths = compiled._paths._replace(compiled=count)  # type: ignore[arg-type] # only called

    def said(engine: TorchEngine, *, batch_invariant: bool) -> list[int]:
        driver = Driver(engine)
        driver.batch_invariant = batch_invariant
        session = driver.open(list(range(5, 45)), 10)
        driver.finish()
        driver.close(session)
        driver.tick(0)
        return session.outputs

    assert said(compiled, batch_invariant=True) == said(plain, batch_invariant=True)
    vectors = [list(engine.embed([5, 6, 7], "mean")) for engine in (plain, compiled)]
    assert vectors[0] == vectors[1]
    assert taken == []
    assert said(compiled, batch_invariant=False) == said(plain, batch_invariant=False)
    assert taken == [40] + [1] * 9


# --- building


def test_without_a_compiler_the_reason_is_said_and_torch_does_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    config, said = tiny_config("llama"), list[str]()
    decoder = tiny_decoder(TinySource(config), config, torch.float32)
    place = (tiny_pool(config, torch.float32), attention_shape(config))
    around = Surrounding(SystemClock(), said.append)
    assert make_compiled(tmp_path, decoder, place, None, around) is None
    assert said == [
        "CPU step: torch ops, because there are no compiled ones: no C++ compiler (g++, c++, clang++)"
    ]
    assert make_compiled(None, decoder, place, None, around) is None
    assert len(said) == 1, "a cache that is off is no news"


def test_a_compiler_that_fails_or_hangs_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho 'ops.cpp:1: error: no such thing' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _: str(fake))
    with pytest.raises(NoNativeError, match=r"failed: .*no such thing"):
        library(tmp_path, SystemClock())
    fake.write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(build, "BUILD_S_MAX", 0.2)
    with pytest.raises(NoNativeError, match="took more than"):
        library(tmp_path, SystemClock())
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".lock"]


def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NoNativeError, match="others may write"):
        library(tmp_path, SystemClock())


def test_a_broken_library_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "native").mkdir(mode=0o700)
    (tmp_path / "native" / f"{build_key()}.so").write_bytes(b"not a library")
    with pytest.raises(NoNativeError, match="cannot be loaded"):
        load_native(tmp_path, 1, SystemClock())


def test_builders_that_start_together_compile_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops()
    made: list[Path] = []

    def compile_slowly(path: Path) -> None:
        made.append(path)
        threading.Event().wait(0.2)
        shutil.copy(cache_folder() / "native" / f"{build_key()}.so", path)

    monkeypatch.setattr(build, "_compile", compile_slowly)
    threads = [threading.Thread(target=library, args=(tmp_path, SystemClock())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_sizes_that_the_sources_were_not_written_for_are_declined() -> None:
    config = tiny_config("llama")
    assert fits(config, torch.float32)
    assert not fits(config, torch.float16)
    assert not fits(type(config)(**{**_fields(config), "hidden": 72}), torch.float32)
    assert not fits(type(config)(**{**_fields(config), "head_dim": 272}), torch.float32)


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in type(config).__slots__}
