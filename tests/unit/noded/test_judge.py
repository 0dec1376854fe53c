"""What an OPEN may ask of this node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.engine.base import Capabilities, EngineInfo
from superfluid_core.errors import ErrorCode
from superfluid_core.session import (
    Determinism,
    Grammar,
    GrammarKind,
    QosClass,
    SamplingParams,
    SessionKey,
    SessionSpec,
)
from superfluid_core.wire.messages import Open
from superfluid_noded.judge import Denial, judge_open

INFO = EngineInfo(
    weights_fingerprint="w", text_fingerprint="t", engine_build="b", dtype="d", device="cpu",
    vocabulary=100, eos_ids=(99,), window=32, lanes=4, block_tokens=16, blocks=8, step_tokens=64,
    determinism=Determinism.EXACT,
)  # fmt: skip
OPEN = Open(
    session=1, epoch=1, model="m", prompt=(1, 2, 3), delivered=(), max_output=10, min_output=0,
    sampling=SamplingParams(), choice=0, stop_ids=(7,), ignore_eos=False, grammar=None,
    qos=QosClass.AGENT, tenant="t", batch_invariant=False, cache_salt=b"", lease_stamp_ns=0,
    lease_ttl_ms=1000,
)  # fmt: skip
NONE = Capabilities(penalties=False, logit_bias=False, logprobs=False)


def judge(info: EngineInfo = INFO, **fields: Any) -> SessionSpec | Denial:
    known = info if fields.get("model", "m") == "m" else None
    return judge_open(replace(OPEN, **fields), known, SessionKey("h", 1), 5)


def accepted(**fields: Any) -> SessionSpec:
    spec = judge(**fields)
    assert isinstance(spec, SessionSpec)
    return spec


def test_end_of_text_ids_join_the_stop_ids_unless_ignored() -> None:
    assert accepted().stop_ids == {7, 99}
    assert accepted(ignore_eos=True).stop_ids == {7}


def test_more_output_than_the_window_holds_ends_at_the_window() -> None:
    spec = accepted(max_output=1000, min_output=500)
    assert spec.max_output == 29
    assert spec.min_output == 29


def test_so_does_the_deadline_for_the_start() -> None:
    assert accepted(start_deadline_ms=700).start_deadline_ns == 700_000_005
    assert accepted().start_deadline_ns is None


def test_a_deadline_counts_from_the_receipt() -> None:
    assert accepted(deadline_ms=3).deadline_ns == 5 + 3_000_000
    assert accepted().deadline_ns is None


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"model": "x"}, ErrorCode.MODEL_NOT_FOUND, "'x'"),
        ({"prompt": (100,)}, ErrorCode.INVALID_REQUEST, "prompt"),
        ({"delivered": (100,)}, ErrorCode.INVALID_REQUEST, "delivered"),
        ({"stop_ids": (100,)}, ErrorCode.INVALID_REQUEST, "stop_ids"),
        ({"sampling": SamplingParams(logit_bias=((100, 1.0),))}, ErrorCode.INVALID_REQUEST, "logit_bias"),
        ({"sampling": SamplingParams(allowed_token_ids=(100,))}, ErrorCode.INVALID_REQUEST, "allowed"),
        ({"sampling": SamplingParams(bad_words=((1, 100),))}, ErrorCode.INVALID_REQUEST, "bad_words"),
        ({"sampling": SamplingParams(bad_words=((),))}, ErrorCode.INVALID_REQUEST, "empty word"),
        ({"prompt": ()}, ErrorCode.INVALID_REQUEST, "empty"),
        ({"max_output": 0}, ErrorCode.INVALID_REQUEST, "max_output"),
        ({"min_output": 11}, ErrorCode.INVALID_REQUEST, "min_output"),
        ({"delivered": (1,) * 10}, ErrorCode.INVALID_REQUEST, "complete"),
        ({"prompt": (1,) * 32}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "window of 32"),
        ({"prompt": (1,) * 30, "delivered": (1, 2)}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "30 + 2"),
    ],
)  # fmt: skip
def test_what_can_never_work_is_refused_by_name(
    fields: dict[str, Any], code: ErrorCode, word: str
) -> None:
    denial = judge(**fields)
    assert isinstance(denial, Denial)
    assert denial.code is code
    assert word in denial.text


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SamplingParams(presence_penalty=0.5)},
        {"sampling": SamplingParams(frequency_penalty=0.5)},
        {"sampling": SamplingParams(repetition_penalty=1.1)},
        {"sampling": SamplingParams(logit_bias=((1, 1.0),))},
        {"sampling": SamplingParams(bad_words=((1,),))},
        {"sampling": SamplingParams(logprobs=0)},
        {"grammar": Grammar(GrammarKind.REGEX, "a")},
        {"batch_invariant": True},
        {"prompt_logprobs": 1},
    ],
)  # fmt: skip
def test_what_the_engine_cannot_do_is_refused_before_it_is_queued(fields: dict[str, Any]) -> None:
    denial = judge(replace(INFO, capabilities=NONE), **fields)
    assert isinstance(denial, Denial)
    assert denial.code is ErrorCode.UNSUPPORTED
    able = Capabilities(structured_output=True, batch_invariant=True, prompt_logprobs=True)
    assert isinstance(judge(replace(INFO, capabilities=able), **fields), SessionSpec)
