"""Vectors of the torch engine: against transformers' hidden states, in any cut, beside sessions, and without touching them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from superfluid_core.engine.scores import scoring, unpack_scores
from superfluid_core.engine.torch import pooling
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.errors import GenerationError
from superfluid_core.session import TokenLogprobs
from tests.unit.engine_torch.test_engine import spec

IDS = [5, 9, 200, 31, 7, 7, 120, 44, 2, 18, 99]


def vector(engine: TorchEngine, ids: Sequence[int], kind: str) -> torch.Tensor:
    *waits, last = engine.embed(ids, kind)
    assert waits == [None] * len(waits)
    assert last is not None
    return torch.frombuffer(bytearray(last), dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_vectors_are_the_pooled_states_of_the_reference(
    family: str,
    tiny: Callable[[str], tuple[Path, Any]],
    build_engine: Callable[..., TorchEngine],
) -> None:
    path, model = tiny(family)
    engine = build_engine(path, kv_blocks=32, block_tokens=4, step_tokens=4)
    with torch.inference_mode():
        states = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states[-1][0]
    for kind, pooled in (("mean", states.mean(0)), ("last", states[-1])):
        expected = torch.nn.functional.normalize(pooled.float(), dim=0)
        assert torch.allclose(vector(engine, IDS, kind), expected, atol=1e-5)


def test_passes_are_of_a_steps_size_and_sessions_go_on_between_them(
    tiny: Callable[[str], tuple[Path, Any]], build_engine: Callable[..., TorchEngine]
) -> None:
    """Ten blocks are all that the session has; a text needs none of them."""
    path = tiny("llama")[0]
    engine = build_engine(path, kv_blocks=10, block_tokens=4, step_tokens=4)
    driver = Driver(engine)
    alone = driver.open_spec(spec(max_output=33))
    driver.finish()
    expected = vector(engine, IDS, "mean")
    driver.close(alone)
    beside = driver.open_spec(spec(max_output=33))
    driver.tick(steps=3)
    passes = engine.embed(IDS, "mean")
    assert next(passes) is None
    driver.tick(steps=3)
    assert next(passes) is None
    driver.finish()
    found = next(passes)
    assert found is not None
    assert torch.equal(torch.frombuffer(bytearray(found), dtype=torch.float32), expected)
    assert beside.outputs == alone.outputs


def test_states_that_are_not_finite_fail_the_text_and_not_the_engine(
    tiny: Callable[[str], tuple[Path, Any]], build_engine: Callable[..., TorchEngine]
) -> None:
    engine = build_engine(tiny("llama")[0], kv_blocks=8, block_tokens=4)
    before = vector(engine, IDS, "last")
    norm = engine._paths.decoder.weights.final_norm
    kept = norm.clone()
    with torch.inference_mode():
        norm.fill_(float("nan"))
    with pytest.raises(GenerationError):
        vector(engine, IDS, "last")
    with torch.inference_mode():
        norm.copy_(kept)
    assert torch.equal(vector(engine, IDS, "last"), before)


def scores(engine: TorchEngine, ids: Sequence[int], best: int) -> list[TokenLogprobs]:
    *_, last = engine.embed(ids, scoring(best))
    assert last is not None
    return unpack_scores(last, len(ids))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scores_are_the_log_probabilities_of_the_reference(
    family: str,
    tiny: Callable[[str], tuple[Path, Any]],
    build_engine: Callable[..., TorchEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In passes of four tokens and slices of three rows."""
    monkeypatch.setattr(pooling, "SCORED_AT_ONCE", 3)
    path, model = tiny(family)
    engine = build_engine(path, kv_blocks=32, block_tokens=4, step_tokens=4)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0].float().log_softmax(-1)
    for best in (0, 3):
        found = scores(engine, IDS, best)
        assert len(found) == len(IDS) - 1
        for row, (score, token) in enumerate(zip(found, IDS[1:], strict=True)):
            assert abs(score.logprob - float(expected[row, token])) < 1e-4
            top = expected[row].topk(best)
            assert [each for each, _ in score.top] == top.indices.tolist()
            values = torch.tensor([value for _, value in score.top])
            assert torch.allclose(values, top.values, atol=1e-4)


def test_a_text_that_was_generated_scores_as_it_was_sampled(
    tiny: Callable[[str], tuple[Path, Any]], build_engine: Callable[..., TorchEngine]
) -> None:
    engine = build_engine(tiny("llama")[0], kv_blocks=16, block_tokens=4, step_tokens=4)
    driver = Driver(engine)
    wanted = spec(max_output=9)
    wanted.sampling = replace(wanted.sampling, logprobs=2)
    session = driver.open_spec(wanted)
    driver.finish()
    found = scores(engine, (*wanted.prompt, *session.outputs), 2)[-len(session.outputs) :]
    for score, sampled in zip(found, session.logprobs, strict=True):
        assert sampled is not None
        assert abs(score.logprob - sampled.logprob) < 1e-4
        assert [token for token, _ in score.top] == [token for token, _ in sampled.top]
