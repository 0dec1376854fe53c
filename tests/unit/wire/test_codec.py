"""Every message survives the trip, in the bytes that were agreed on once and for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.errors import LocalProtocolError
from superfluid_core.limits import WireLimits
from superfluid_core.session import (
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    TokenLogprobs,
)
from superfluid_core.wire import codec, columns, kinds, packed
from superfluid_core.wire import messages as m
from superfluid_core.wire.frames import FrameBuffer
from superfluid_core.wire.schema import Role, Spec, schema

GOLDEN = Path(__file__).parent / "golden"
LIMITS = WireLimits()
ENGINE = m.EngineLoad(0, 1, 0, 0, 0, 0, 0, 0.0, ())
SLOWER_THAN_NOTHING = replace(ENGINE, decode_rates=((1, -1.0),))


def decoded(data: bytes) -> m.Message:
    buffer = FrameBuffer()
    buffer.feed(data, 0)
    frame = buffer.next(lambda header: None)
    assert frame is not None
    assert len(buffer) == 0
    return codec.decode(frame)


def test_a_message_survives_the_trip(example: Any) -> None:
    assert decoded(codec.encode(example)) == example


def test_the_bytes_of_minor_0_never_change(example_name: str, examples: dict[str, Any]) -> None:
    golden = bytes.fromhex((GOLDEN / f"{example_name}.hex").read_text())
    assert codec.encode(examples[example_name]) == golden
    assert decoded(golden) == examples[example_name]


def test_every_message_has_a_spec_an_example_and_golden_bytes(examples: dict[str, Any]) -> None:
    shapes = set(get_args(m.Message))
    assert shapes == set(schema(LIMITS).by_shape)
    assert shapes == {type(example) for example in examples.values()}
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(examples)


def test_a_head_is_never_nested_deeper_than_four() -> None:
    def depth(kind: Any) -> int:
        match kind:
            case kinds.Nilable():
                return depth(kind.kind)
            case kinds.ListOf():
                return 1 + depth(kind.kind)
            case kinds.Row():
                return 1 + max(map(depth, kind.kinds))
            case kinds.Record():
                return 1 + max(map(depth, kind.fields.values()))
            case packed.PackedWords():
                return 1
            case _:
                return 0

    for spec in schema(LIMITS).by_number.values():
        assert 1 + max([depth(kind) for kind in spec.fields.values()], default=0) <= 4


# --- any message --------------------------------------------------------------------------------


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    if type(kind) in MAKERS:
        return MAKERS[type(kind)](kind)
    return packed_values_of(kind)


def text_of(kind: kinds.Text) -> st.SearchStrategy[str]:
    if kind.pattern is not None:
        return st.from_regex(kind.pattern, fullmatch=True)
    letters = st.characters(codec="utf-8").filter(str.isprintable)
    return st.text(letters, min_size=kind.chars_min, max_size=min(kind.chars_max, 8))


def record_of(kind: kinds.Record) -> st.SearchStrategy[Any]:
    parts = {name: values_of(inner) for name, inner in kind.fields.items()}
    return st.builds(kind.shape, **parts)


MAKERS: dict[type[Any], Callable[[Any], st.SearchStrategy[Any]]] = {
    kinds.UInt: lambda kind: st.integers(kind.low, kind.high),
    kinds.Flag: lambda kind: st.booleans(),
    kinds.Real: lambda kind: st.floats(kind.low, kind.high),
    kinds.Text: text_of,
    kinds.Prose: lambda kind: st.text(st.characters(codec="utf-8"), max_size=20),
    kinds.Name: lambda kind: st.sampled_from(sorted(kind.members.values())),
    kinds.Rank: lambda kind: st.sampled_from(list(kind.ranks)),
    kinds.Octets: lambda kind: st.binary(max_size=min(kind.bytes_max, 8)),
    kinds.Nilable: lambda kind: st.none() | values_of(kind.kind),
    kinds.ListOf: lambda kind: st.lists(values_of(kind.kind), max_size=3, unique=kind.is_set).map(
        tuple
    ),
    kinds.Row: lambda kind: st.tuples(*map(values_of, kind.kinds)),
    kinds.Record: record_of,
}


IDS = st.lists(st.integers(0, 2**32 - 1), max_size=6).map(tuple)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LOGPROB = st.floats(columns.LOGPROB_MIN, 0.0)
TOPS = st.lists(st.tuples(st.integers(0, 2**32 - 1), LOGPROB), max_size=3).map(tuple)
LOGPROBS = st.builds(TokenLogprobs, LOGPROB, TOPS)


def packed_values_of(kind: Any) -> st.SearchStrategy[Any]:
    match kind:
        case packed.PackedIds() | columns.Ids():
            return IDS
        case packed.PackedRates():
            rates = st.floats(0.0, 1e12, allow_nan=False)
            return st.lists(st.tuples(st.integers(0, 2**32 - 1), rates), max_size=4).map(tuple)
        case packed.PackedBias():
            return st.lists(st.tuples(st.integers(0, 2**32 - 1), FLOATS), max_size=3).map(tuple)
        case packed.PackedWords():
            return st.lists(IDS.filter(bool), max_size=3).map(tuple)
        case columns.Hashes():
            return st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple)
        case columns.Data():
            return st.binary(max_size=8).map(lambda data: data * kind.multiple)
        case columns.GrammarText():
            text = st.text(st.characters(codec="utf-8"), max_size=9)
            return st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), text)
        case columns.LogprobRows():
            return st.lists(LOGPROBS, max_size=4).map(tuple)
        case columns.TokenRows():
            return st.lists(token_rows(), min_size=1, max_size=4).map(tuple)
        case _:
            raise AssertionError(kind)


@st.composite
def token_rows(draw: st.DrawFn) -> m.TokenRow:
    ids: tuple[int, ...] = draw(IDS)
    logprobs: tuple[TokenLogprobs, ...] = ()
    has_logprobs: bool = draw(st.booleans())
    if ids and has_logprobs:
        logprobs = tuple(draw(LOGPROBS) for _ in ids)
    finish = draw(st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]))
    stop_id = draw(st.none() | st.integers(0, 2**32 - 1))
    session, number = draw(st.integers(1, 2**64 - 1)), draw(st.integers(0, 2**32 - 1))
    return m.TokenRow(session, number, number, ids, finish, stop_id, logprobs)


def messages_of(spec: Spec) -> st.SearchStrategy[Any]:
    parts = {name: values_of(kind) for name, kind in spec.fields.items()}
    parts |= {name: packed_values_of(column) for name, column in spec.columns.items()}
    if spec.has_session:
        parts["session"] = st.integers(0 if spec.may_lack_session else 1, 2**64 - 1)
    return st.builds(spec.shape, **parts)


ANY_MESSAGE = st.one_of([messages_of(spec) for spec in schema(LIMITS).by_number.values()])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(ANY_MESSAGE)
def test_any_message_survives_the_trip(message: Any) -> None:
    if hasattr(message, "pieces"):
        message = replace(message, piece=message.piece % message.pieces)
    assert decoded(codec.encode(message)) == message


@settings(max_examples=100, deadline=None)
@given(ANY_MESSAGE)
def test_the_estimate_is_never_far_below_the_truth(message: Any) -> None:
    if hasattr(message, "pieces"):
        message = replace(message, piece=message.piece % message.pieces)
    assert codec.estimate_bytes(message) * 4 + 256 >= len(codec.encode(message))


# --- our own mistakes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        m.Hello(0, ("a", "a"), "h"),
        m.Hello(0, (), "no spaces"),
        m.Hello(0, (), ""),
        m.Hello(True, (), "h"),
        m.Opened(0, 1, 0, 0),
        m.Opened(2**64, 1, 0, 0),
        m.Opened(1, -1, 0, 0),
        m.Renew(2**64),
        m.Tokens(()),
        m.Tokens(tuple(m.TokenRow(1, 1, 0, (1,)) for _ in range(257))),
        m.Tokens((m.TokenRow(1, 1, 0, (2**32,)),)),
        m.Tokens((m.TokenRow(1, 1, 0, (-1,)),)),
        m.Tokens((m.TokenRow(1, 1, 0, (1,), logprobs=(TokenLogprobs(float("nan")),)),)),
        m.Tokens((m.TokenRow(1, 1, 0, (1, 2), logprobs=(TokenLogprobs(-1.0),)),)),
        m.Tokens((m.TokenRow(1, 1, 0, (1,), FinishReason.ERROR),)),
        m.FilePiece(1, 2, 2, "", b""),
        m.FilePiece(1, 0, 1, "", bytes(48 * 1024 + 1)),
        m.FileAsk(1, "m", "../secret"),
        m.Pin((b"short",), 1, "m"),
        m.Pin((b"a" * 16,), 1, ""),
        m.Status(0, 0, 0, 0, (0, 0, 0, 0), 0, 0, 0, 0, 0.0, (), 0, False, (ENGINE,) * 9),
        m.Status(0, 0, 0, 0, (0, 0, 0, 0), 0, 0, 0, 0, 0.0, (), 0, False, (SLOWER_THAN_NOTHING,)),
        m.Prefix(1, 0, 1, True, (), (), 8),
        m.Embedded(1, 0, 1, b"abc"),
        m.Unpin(tuple(bytes(16) for _ in range(4097)), "m"),
        m.Goaway(7),  # type: ignore[arg-type] # a mistake
    ],
)
def test_what_a_peer_would_refuse_is_not_sent(message: Any) -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode(message)


@pytest.mark.parametrize("left_ms", [0, -1, 2**32, 1.5, True])
def test_a_start_deadline_is_a_duration_of_at_least_a_millisecond(
    left_ms: Any, examples: dict[str, Any]
) -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode(replace(examples["Open"], start_deadline_ms=left_ms))


def test_sampling_out_of_range_is_not_sent(examples: dict[str, Any]) -> None:
    for sampling in (
        SamplingParams(temperature=float("nan")),
        SamplingParams(top_p=1.5),
        SamplingParams(logprobs=21),
        SamplingParams(seed=2**64),
        SamplingParams(bad_words=((),)),
        SamplingParams(logit_bias=((1, float("inf")),)),
        SamplingParams(logit_bias=tuple((token, 0.0) for token in range(1025))),
    ):
        with pytest.raises(LocalProtocolError):
            codec.encode(replace(examples["Open"], sampling=sampling))


def test_the_largest_lists_fit_the_head(examples: dict[str, Any]) -> None:
    many = tuple(range(1024))
    sampling = SamplingParams(
        logit_bias=tuple((token, 1.0) for token in many),
        allowed_token_ids=many,
        bad_words=tuple((token,) * 8 for token in many),
    )
    message = replace(examples["Open"], sampling=sampling, stop_ids=many, model="m" * 256)
    assert decoded(codec.encode(message)) == message


def test_words_are_cut_and_cleaned_instead_of_refused() -> None:
    sent = decoded(codec.encode(m.Goaway("a\ud800" + "b" * 300)))
    assert sent == m.Goaway("a?" + "b" * 198)


def test_a_log_probability_of_nothing_is_sent_as_a_finite_number() -> None:
    row = m.TokenRow(1, 1, 0, (1,), logprobs=(TokenLogprobs(float("-inf"), ((2, float("-inf")),)),))
    sent = decoded(codec.encode(m.Tokens((row,))))
    assert isinstance(sent, m.Tokens)
    assert sent.rows[0].logprobs == (TokenLogprobs(-9999.0, ((2, -9999.0),)),)


def test_roles_are_each_others_other() -> None:
    assert Role.HEAD.other is Role.NODE
    assert Role.NODE.other is Role.HEAD
