"""The engine against transformers on tiny random checkpoints: every family, fp32, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.drive import Driver

Tiny = Callable[[str], tuple[Path, Any]]
FAMILIES = [
    "llama",
    "llama-llama3-bias",
    "llama-yarn",
    "llama-linear",
    "mistral-sliding",
    "qwen2",
    "qwen3",
]
OUTPUT = 12


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 37, 90, 16)
    return [torch.randint(0, 300, (n,), generator=generator).tolist() for n in lengths]


def reference_logits(model: Any, context: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([context])).logits[0]
    return logits


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["padded", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_chunked_paged_logits_agree_with_transformers(
    family: str, attention: str, tiny: Tiny, build_engine: Callable[..., Any]
) -> None:
    path, model = tiny(family)
    engine = build_engine(path, kv_blocks=64, block_tokens=4, attention=attention)
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(rows: list[StepRow], logits: torch.Tensor) -> None:
        for row, line in zip(rows, logits, strict=True):
            seen.setdefault(row.lane, []).append(line.clone())

    engine.on_logits = keep
    driver = Driver(engine, blocks=[(block * 29 + 3) % 64 for block in range(64)])
    texts = prompts()
    sessions = [driver.open(text, OUTPUT) for text in texts[:2]]
    driver.tick(steps=2, prompt_tokens=11, step_tokens=9)
    sessions += [driver.open(text, OUTPUT) for text in texts[2:]]
    driver.finish(steps=3, prompt_tokens=11, step_tokens=9)
    for session, text in zip(sessions, texts, strict=True):
        expected = reference_logits(model, session.context)[len(text) - 1 : -1]
        found = torch.stack(seen[session.lane])
        assert len(session.outputs) == OUTPUT
        assert session.outputs == expected.argmax(-1).tolist()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert any(step.prefilled and step.ids for step in driver.steps), "no mixed step was run"


@pytest.mark.reference
@pytest.mark.slow
def test_forward_only_gives_the_logits_of_a_plan(
    tiny: Tiny, build_engine: Callable[..., Any]
) -> None:
    path, model = tiny("qwen2")
    engine = build_engine(path, kv_blocks=64)
    driver = Driver(engine)
    text = prompts()[2]
    driver.open(text, 1)
    found = engine.forward_only(driver.plan(steps=1))
    torch.testing.assert_close(found[0], reference_logits(model, text)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.reference
@pytest.mark.slow
def test_a_sharded_checkpoint_is_read_from_all_of_its_files(
    tiny: Tiny, build_engine: Callable[..., Any]
) -> None:
    path, _ = tiny("qwen3")
    assert len(list(path.glob("*.safetensors"))) > 1
    driver = Driver(build_engine(path, kv_blocks=16))
    session = driver.open([5, 6, 7], 4)
    driver.finish()
    assert len(session.outputs) == 4
