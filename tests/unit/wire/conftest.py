"""One example of every message of minor 0. Golden bytes depend on them: add, never change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.errors import ErrorCode
from superfluid_core.session import (
    Determinism,
    FinishReason,
    Grammar,
    GrammarKind,
    QosClass,
    SamplingParams,
    TokenLogprobs,
)
from superfluid_core.wire import messages as m
from superfluid_core.wire import notes as n

BIG = 2**63 + 12345
STATUS = m.Status(
    stamp_ns=123_456_789_012,
    steps=4242,
    lanes_busy=3,
    lanes=8,
    queued=(1, 0, 2, 0),
    queued_tokens=9000,
    blocks_used=100,
    blocks_cached=40,
    blocks=2048,
    prefill_rate=2950.5,
    decode_rates=((1, 41.0), (8, 190.25)),
    step_predicted_ms=42,
    draining=False,
)
TWO_ENGINES = replace(
    STATUS,
    engines=(
        m.EngineLoad(2, 6, 3, 8_990, 100, 40, 2048, 2950.5, ((1, 41.0), (8, 190.25))),
        m.EngineLoad(1, 2, 0, 10, 3, 1, 64, 0.0, ()),
    ),
)
SAMPLING = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.95,
    min_p=0.05,
    seed=2**64 - 1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.1,
    logit_bias=((7, -100.0), (9, 2.5)),
    allowed_token_ids=(1, 2, 3),
    bad_words=((5,), (6, 7, 8)),
    logprobs=5,
)
OFFER = m.ModelOffer(
    name="qwen3-8b",
    weights="0123456789abcdef",
    text="fedcba9876543210",
    dtype="bfloat16",
    build="torch-2.13",
    vocabulary=151_936,
    eos_ids=(151_645, 151_643),
    window=32_768,
    lanes=8,
    block_tokens=16,
    blocks=16_384,
    engine=1,
)
LOGPROBS = TokenLogprobs(-0.25, ((11, -0.25), (12, -1.75)))

EXAMPLES: dict[str, Any] = {
    "Hello": m.Hello(0, ("prefix", "embed"), "head-1.example"),
    "Welcome": m.Welcome(
        minor=0,
        features=("embed",),
        node="box-a",
        boot="b00f",
        models=(OFFER,),
        stamp_ns=BIG,
        determinism=Determinism.BATCH_INVARIANT,
        sessions_max=16,
        lease_ttl_max_ms=30_000,
        idle_timeout_ms=120_000,
        salt=b"\x00\xff",
    ),
    "Refuse": m.Refuse(ErrorCode.QUEUE_FULL, "full", 1500, BIG, 2),
    "Refuse-link": m.Refuse(ErrorCode.OVERLOADED, "too many heads"),
    "Open": m.Open(
        session=BIG,
        epoch=3,
        model="qwen3-8b",
        prompt=(1, 2, 2**32 - 1, 4),
        delivered=(5, 6),
        max_output=512,
        min_output=4,
        sampling=SAMPLING,
        choice=1,
        stop_ids=(151_645,),
        ignore_eos=True,
        grammar=Grammar(GrammarKind.REGEX, "[a-zé]+"),
        qos=QosClass.INTERACTIVE,
        tenant="team blue",
        batch_invariant=True,
        cache_salt=b"pepper",
        lease_stamp_ns=99,
        lease_ttl_ms=10_000,
        deadline_ms=60_000,
        prompt_logprobs=2,
        start_deadline_ms=700,
        weight=7,
    ),
    "Open-plain": m.Open(
        session=1,
        epoch=0,
        model="m",
        prompt=(0,),
        delivered=(),
        max_output=1,
        min_output=0,
        sampling=SamplingParams(),
        choice=0,
        stop_ids=(),
        ignore_eos=False,
        grammar=None,
        qos=QosClass.BACKGROUND,
        tenant="anonymous",
        batch_invariant=False,
        cache_salt=b"",
        lease_stamp_ns=0,
        lease_ttl_ms=1,
    ),
    "Opened": m.Opened(BIG, 1, 64, 2),
    "ProgressReport": m.ProgressReport(BIG, 1, 512, 4096, 64),
    "Tokens": m.Tokens(
        (
            m.TokenRow(BIG, 1, 7, (100,)),
            m.TokenRow(2, 4, 9, (101, 102), FinishReason.STOP, 102, (LOGPROBS, LOGPROBS)),
            m.TokenRow(3, 1, 0, (), FinishReason.LENGTH),
        )
    ),
    "Closed": m.Closed(BIG, 1, m.CloseReason.PREEMPT_FAILED, ErrorCode.PREEMPT_FAILED, "no room"),
    "CancelSession": m.CancelSession(BIG, 1, "client left"),
    "SetClass": m.SetClass(BIG, 1, QosClass.COMPLETION),
    "Renew": m.Renew(BIG),
    "Timing": n.Timing(BIG, 2, 1_500, 2**40),
    "Trace": n.Trace(BIG, 2, f"00-{BIG:032x}-{7:016x}-01"),
    "Status": STATUS,
    "Status-engines": TWO_ENGINES,
    "Prefix": m.Prefix(7, 0, 2, True, (b"a" * 16, b"b" * 16), (b"c" * 16,), 1),
    "Pin": m.Pin((b"a" * 16,), 60_000, "qwen3-8b"),
    "Unpin": m.Unpin((b"a" * 16, b"b" * 16), "qwen3-8b"),
    "FileAsk": m.FileAsk(5, "qwen3-8b", "tokenizer.json"),
    "FilePiece": m.FilePiece(5, 1, 2, "ab" * 32, b"{}"),
    "Embed": m.Embed(BIG, "qwen3-8b", "mean", (1, 2, 3)),
    "Embedded": m.Embedded(BIG, 0, 1, b"\x00\x00\x80?"),
    "PromptLogprobs": m.PromptLogprobs(BIG, 1, 1, (LOGPROBS, TokenLogprobs(-3.5))),
    "StatsAsk": m.StatsAsk(6),
    "Stats": m.Stats(6, 0, 1, b'{"a":1}'),
    "SessionsAsk": m.SessionsAsk(7),
    "Sessions": m.Sessions(
        7, 0, 1, (m.SessionRow("head-1", BIG, "decoding", QosClass.AGENT, "blue", 100, 7),)
    ),
    "Ping": m.Ping(8),
    "Pong": m.Pong(8, STATUS),
    "Pong-head": m.Pong(9),
    "DrainOrder": m.DrainOrder(30_000),
    "DrainOrder-over": m.DrainOrder(None),
    "Goaway": m.Goaway("drain"),
    "LinkError": m.LinkError(ErrorCode.PROTOCOL_ERROR, "bad Tokens"),
}


@pytest.fixture
def examples() -> dict[str, Any]:
    return EXAMPLES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "example" in metafunc.fixturenames:
        metafunc.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())
    if "example_name" in metafunc.fixturenames:
        metafunc.parametrize("example_name", EXAMPLES)
