"""An engine whose weights stay quantized on CUDA against the one that dequantizes them, over the same file."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.session import SamplingParams
from tests.unit.engine_torch.conftest import files_of
from tests.unit.engine_torch.test_kept import PROMPTS, write_quantized

pytestmark = pytest.mark.gpu
KINDS = ("Q4_K", "Q4_1", "Q8_0")
BOUNDS = {"float32": 1e-2, "bfloat16": 1.5}  # logits of the tiny model spread by 15 or so


def build(path: Path, weights: str, dtype: str, *, graphs: bool = True) -> TorchEngine:
    options = TorchOptions(
        device="cuda", dtype=dtype, lanes=4, kv_blocks=128, weights=weights, graphs=graphs
    )
    return build_torch_engine(files_of(path), options)


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantized_engine(kind: str, dtype: str, tmp_path: Path) -> None:
    """Prompts of few rows and of more than are multiplied quantized."""
    path = write_quantized(tmp_path, kind, is_mixed=True)
    found = []
    for weights in ("dequantized", "quantized"):
        engine = build(path, weights, dtype)
        assert ("weights kept quantized" in engine.describe().engine_build) == (
            weights == "quantized"
        )
        driver = Driver(engine)
        for prompt in PROMPTS:
            driver.open(prompt, 1)
        found.append(engine.forward_only(driver.plan(steps=1)))
    assert float((found[0] - found[1]).abs().max()) <= BOUNDS[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_are_those_of_the_dequantized_engine(kind: str, tmp_path: Path) -> None:
    path = write_quantized(tmp_path, kind)
    found = []
    for weights, graphs in (("dequantized", False), ("quantized", False), ("quantized", True)):
        driver = Driver(build(path, weights, "float32", graphs=graphs))
        opened = [driver.open(prompt, 12) for prompt in PROMPTS]
        driver.finish(steps=5)
        found.append([session.outputs for session in opened])
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_auto_keeps_them_and_lanes_are_batch_invariant(tmp_path: Path) -> None:
    engine = build(write_quantized(tmp_path, "Q4_K"), "auto", "bfloat16")
    assert "weights kept quantized" in engine.describe().engine_build
    assert engine.describe().capabilities.batch_invariant
    seen = []
    for prompt_tokens in (None, 7):
        driver = Driver(engine)
        driver.batch_invariant = True
        opened = [driver.open(text, 6, SamplingParams(seed=n)) for n, text in enumerate(PROMPTS)]
        driver.finish(steps=3, prompt_tokens=prompt_tokens)
        seen.append([session.outputs for session in opened])
        for session in opened:
            driver.close(session)
        driver.tick()
    assert seen[0] == seen[1]


def test_memory_of_weights_is_that_of_their_bits(tmp_path: Path) -> None:
    taken = []
    for weights in ("dequantized", "quantized"):
        path = write_quantized(tmp_path, "Q4_1")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = build(path, weights, "float32", graphs=False)
        taken.append(torch.cuda.memory_allocated() - before)
        del engine
        gc.collect()
    assert taken[1] < taken[0]
