"""The engine on CUDA against the same engine on the CPU: logits, greedy ids, noise, parking, by the same code."""

from __future__ import annotations

import pytest
import torch

from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.philox import philox
from superfluid_core.engine.torch.selftest.model import TinyModel, TinySizes, write_tiny_model
from superfluid_core.scheduler.plan import Park, TickPlan
from superfluid_core.session import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("random"), TinySizes())


def build(files: TinyModel, device: str, dtype: str = "float32") -> TorchEngine:
    options = TorchOptions(device=device, dtype=dtype, lanes=4, kv_blocks=128, threads=1)
    return build_torch_engine(files, options)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(0, 1000, (n,), generator=generator).tolist() for n in (1, 40, 130, 17)]


def outputs(engine: TorchEngine, sampling: list[SamplingParams]) -> list[list[int]]:
    driver = Driver(engine, blocks=[(block * 37 + 1) % 128 for block in range(128)])
    opened = [driver.open(p, 24, s) for p, s in zip(prompts(), sampling, strict=True)]
    driver.finish(steps=5, prompt_tokens=30, step_tokens=48)
    return [session.outputs for session in opened]


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def test_logits_agree_with_the_cpu(files: TinyModel) -> None:
    found = []
    for device in ("cpu", "cuda"):
        engine = build(files, device)
        driver = Driver(engine)
        for prompt in prompts():
            driver.open(prompt, 1)
        found.append(engine.forward_only(driver.plan(steps=1)).cpu())
    torch.testing.assert_close(found[1], found[0], atol=1e-3, rtol=1e-3)


def test_greedy_and_drawn_ids_equal_those_of_the_cpu(files: TinyModel) -> None:
    sampling = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=5, temperature=0.8, top_p=0.9),
        SamplingParams(seed=6, top_k=40, repetition_penalty=1.1),
        SamplingParams(seed=7, temperature=0.5),
    ]
    assert outputs(build(files, "cuda"), sampling) == outputs(build(files, "cpu"), sampling)


def test_auto_takes_the_checkpoints_dtype_and_runs(files: TinyModel) -> None:
    engine = build(files, "auto", "auto")
    assert (engine.describe().dtype, engine.describe().device) == ("bfloat16", "cuda")
    assert all(len(ids) == 24 for ids in outputs(engine, [SamplingParams(seed=1)] * 4))


def test_noise_is_the_same_on_the_device() -> None:
    words = [torch.randint(0, 1 << 32, (1000,)) for _ in range(6)]
    here = philox(tuple(words[:4]), (words[4], words[5]))
    moved = [word.cuda() for word in words]
    there = philox(tuple(moved[:4]), (moved[4], moved[5]))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


def test_parked_blocks_come_back_through_pinned_memory(files: TinyModel) -> None:
    engine = build(files, "cuda")
    pool = engine._pool
    with torch.inference_mode():
        pool._slab.normal_()
    before = pool._slab[:, :, [7, 3]].clone()
    engine.run(TickPlan(1, (), 16, park_out=(Park(1, (7, 3)),)), lambda _: None, lambda: False)
    assert all(piece.kept.is_pinned() for piece in pool._parked._kept[1])
    with torch.inference_mode():
        pool._slab.zero_()
    engine.run(TickPlan(2, (), 16, park_in=(Park(1, (90, 91)),)), lambda _: None, lambda: False)
    assert torch.equal(pool._slab[:, :, [90, 91]], before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_lanes_give_the_same_bits_however_they_are_cut(
    files: TinyModel, dtype: str
) -> None:
    engine = build(files, "cuda", dtype)
    assert engine.describe().capabilities.batch_invariant
    seen: list[dict[tuple[int, int], torch.Tensor]] = []
    for prompt_tokens, stride in ((None, 1), (1, 37), (7, 5), (16, 11), (50, 3)):
        found: dict[tuple[int, int], torch.Tensor] = {}
        engine.on_logits = lambda rows, logits, kept=found: kept.update(
            {
                (row.lane, row.output_index): line.clone()
                for row, line in zip(rows, logits, strict=True)
            }
        )
        driver = Driver(engine, blocks=[(block * stride + 1) % 128 for block in range(128)])
        driver.batch_invariant = True
        opened = [
            driver.open(prompt, 6, SamplingParams(seed=n)) for n, prompt in enumerate(prompts())
        ]
        driver.finish(steps=3, prompt_tokens=prompt_tokens)
        for session in opened:
            driver.close(session)
        driver.tick()
        seen.append(found)
    for other in seen[1:]:
        assert other.keys() == seen[0].keys()
        assert all(torch.equal(line, other[at]) for at, line in seen[0].items())
