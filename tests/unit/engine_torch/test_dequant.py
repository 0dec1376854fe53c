"""Every GGUF element type against the `gguf` package, bit for bit in float32."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from superfluid_core.engine.torch.dequant import DECODERS, dequantize
from superfluid_core.engine.torch.outline import FOUR_BITS
from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.gguf import BLOCKS, GgmlType


@pytest.mark.reference
@pytest.mark.parametrize("kind", list(DECODERS), ids=lambda kind: kind.name)
def test_a_type_decodes_as_the_reference_does(kind: GgmlType) -> None:
    import gguf

    random = np.random.default_rng(int(kind) + 1)
    elements, block_bytes = BLOCKS[kind]
    rows, columns = 6, 512
    blocks = rows * columns // elements
    raw = random.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    halves = {
        GgmlType.F16: (0,),
        GgmlType.Q4_0: (0,),
        GgmlType.Q4_1: (0, 2),
        GgmlType.Q5_0: (0,),
        GgmlType.Q5_1: (0, 2),
        GgmlType.Q8_0: (0,),
        GgmlType.Q4_K: (0, 2),
        GgmlType.Q5_K: (0, 2),
        GgmlType.Q6_K: (208,),
        GgmlType.Q2_K: (80, 82),
        GgmlType.Q3_K: (108,),
        GgmlType.IQ4_NL: (0,),
    }.get(kind, ())
    for at in halves:
        scale = random.standard_normal(blocks).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8).reshape(blocks, 2)
    if kind in (GgmlType.F32, GgmlType.BF16):
        numbers = random.standard_normal(blocks).astype(np.float32)
        raw = numbers.view(np.uint8).reshape(blocks, 4)[:, 4 - block_bytes :].copy()
    expected = gguf.quants.dequantize(
        raw.reshape(rows, -1), gguf.GGMLQuantizationType(int(kind))
    ).astype(np.float32)
    found = dequantize(raw.tobytes(), kind, (rows, columns))
    assert found.dtype is torch.float32
    assert found.numpy().tobytes() == expected.tobytes()


def test_a_tensor_larger_than_a_slice_decodes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.arange(4096, dtype=np.float32)
    whole = dequantize(numbers.tobytes(), GgmlType.F32, (64, 64))
    monkeypatch.setattr("superfluid_core.engine.torch.dequant.SLICE_BLOCKS_32", 3)
    sliced = dequantize(numbers.tobytes(), GgmlType.F32, (64, 64))
    assert torch.equal(whole, sliced)
    assert torch.equal(sliced.flatten(), torch.arange(4096.0))


def test_the_types_that_the_design_names_are_read() -> None:
    k_quants = {f"Q{bits}_K" for bits in range(2, 7)}
    simple = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"}
    assert {kind.name for kind in DECODERS} == k_quants | simple | {"F32", "F16", "BF16"}


def test_the_text_on_models_has_exactly_the_types_that_are_read() -> None:
    text = (Path(__file__).parents[3] / "docs/models.md").read_text("utf-8")
    section = text.partition("## Element types")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.M)
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(named) == sorted(kind.name for kind in DECODERS)
    own = {name for row, way in re.findall(r"^\| (`[^|]*) \| their own (4|8)", section, re.M)
           for name in re.findall(r"`(\w+)`", row) if way == "4"}  # fmt: skip
    assert own == set(FOUR_BITS)


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(ModelFilesError, match="IQ2_XXS"):
        dequantize(b"\0" * 66, GgmlType.IQ2_XXS, (1, 256))


def test_the_result_is_rounded_once_to_the_wanted_dtype() -> None:
    numbers = np.array([1.00390625, 1.0, -3.14159274], dtype=np.float32)
    found = dequantize(numbers.tobytes(), GgmlType.F32, (3,), torch.bfloat16)
    assert torch.equal(found, torch.from_numpy(numbers).bfloat16())
