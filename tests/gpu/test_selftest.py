"""What `superfluid selftest` checks, as tests: every kernel over random scenes, whole engines against each other, and what only a device shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from superfluid_core.engine.torch.attention.base import AttentionShape, Site
from superfluid_core.engine.torch.attention.choose import choose_attention, unfit
from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.selftest.engines import SAMPLINGS, engine_checks, prompts
from superfluid_core.engine.torch.selftest.kernels import Bench, kernel_checks
from superfluid_core.engine.torch.selftest.model import TinySizes, write_tiny_model
from superfluid_core.engine.torch.selftest.products import product_checks
from superfluid_core.scheduler.plan import StepDone

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel_computes_what_plain_torch_does(dtype: torch.dtype, seed: int) -> None:
    failed = [c for c in kernel_checks(Bench(CUDA, dtype, seed)) if c.verdict == "failed"]
    assert not failed


@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_quantized_matrices_are_those_of_plain_torch(
    dtype: torch.dtype, seed: int
) -> None:
    assert [c for c in product_checks(Bench(CUDA, dtype, seed)) if c.verdict != "ok"] == []


def test_whole_engines_say_the_same(tmp_path: Path) -> None:
    failed = [c for c in engine_checks(CUDA, tmp_path, TinySizes()) if c.verdict == "failed"]
    assert not failed


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_our_own_kernels_are_always_there(dtype: torch.dtype, block_tokens: int) -> None:
    for shape in (AttentionShape(32, 8, 128), AttentionShape(9, 3, 64, sliding_window=64)):
        site = Site(CUDA, dtype, block_tokens, shape)
        assert unfit("triton", site) is None
        assert choose_attention("auto", site) in ("flashinfer", "varlen", "triton")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # a prototype, torch warns
def test_steps_ahead_never_wait_for_the_device_but_to_read_ids(tmp_path: Path) -> None:
    """After a stretch's first step torch is told to raise at whatever would make the host wait."""
    files = write_tiny_model(tmp_path, TinySizes())
    options = TorchOptions(device="cuda", lanes=4, kv_blocks=128, attention="triton")
    engine = build_torch_engine(files, options)
    driver = Driver(engine)
    for prompt, sampling in zip(prompts(1000, 512), SAMPLINGS, strict=True):
        driver.open(prompt, 64, sampling)
    driver.tick(steps=2)
    driver.tick(steps=2)  # kernels of the draw are compiled by now
    reported: list[StepDone] = []

    def on_step(step: StepDone) -> None:
        reported.append(step)
        torch.cuda.set_sync_debug_mode("error")

    try:
        engine.run(driver.plan(steps=20), on_step, lambda: False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(reported) == 20


def test_the_pool_leaves_room_for_what_steps_need(tmp_path: Path) -> None:
    """Sized from free memory, the engine then runs its widest step and every recorded size without running out."""
    files = write_tiny_model(tmp_path, TinySizes())
    options = TorchOptions(device="cuda", lanes=16, gpu_memory_utilization=0.5)
    before = torch.cuda.mem_get_info(CUDA)[0]
    engine = build_torch_engine(files, options)
    taken = before - torch.cuda.mem_get_info(CUDA)[0]
    assert 0.3 * before < taken < 0.7 * before
    driver = Driver(engine)
    sessions = [driver.open([n + 1] * 300, 8) for n in range(16)]
    driver.finish(steps=8)
    assert all(session.fault is None for session in sessions)
