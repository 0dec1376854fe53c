"""Masks of lanes: ready for the next id, replayed over what exists, faults that are one lane's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from superfluid_core.engine.sim import NumberedTexts
from superfluid_core.errors import ErrorCode
from superfluid_core.grammar.compiler import Grammars, vocabulary_of
from superfluid_core.grammar.lanes import GrammarFault, LaneMasks, Mask
from superfluid_core.scheduler.plan import LaneStart
from superfluid_core.session import Grammar, GrammarKind, SessionKey, SessionSpec

TEXTS = NumberedTexts(300)
END = 299


@pytest.fixture
def masks() -> Iterator[LaneMasks]:
    made = LaneMasks(Grammars(lambda: vocabulary_of(TEXTS, 300)))
    yield made
    made.close()


def start(lane: int, pattern: str | None, outputs: bytes = b"") -> LaneStart:
    grammar = None if pattern is None else Grammar(GrammarKind.REGEX, pattern)
    spec = SessionSpec(SessionKey("h", lane), "m", (1, 2), 16, grammar=grammar)
    return LaneStart(lane, spec, tuple(outputs))


def allowed(mask: Mask | GrammarFault) -> list[int]:
    assert isinstance(mask, Mask), mask
    return [token for token in range(300) if mask.allows(token)]


def test_a_mask_follows_what_was_sampled_until_only_the_end_is_left(masks: LaneMasks) -> None:
    assert masks.start(start(0, "ab?c")) is None
    assert masks.start(start(1, None)) is None
    assert allowed(masks.take((0, 1))[0]) == [ord("a")]
    masks.advance({0: ord("a"), 1: 7})
    assert allowed(masks.take((0,))[0]) == [ord("b"), ord("c")]
    masks.advance({0: ord("c")})
    last = masks.take((0,))[0]
    assert allowed(last) == [END]
    assert isinstance(last, Mask)
    assert last.is_over
    masks.free(0)
    assert masks.take((0, 1)) == {}
    assert not masks


def test_a_session_that_comes_from_elsewhere_goes_on_where_it_was(masks: LaneMasks) -> None:
    masks.start(start(3, "abc", b"ab"))
    assert allowed(masks.take((3,))[3]) == [ord("c")]
    masks.start(start(3, "abc", b"abc"))
    assert allowed(masks.take((3,))[3]) == [END]


def test_ids_that_the_constraint_rejects_are_a_replay_fault_of_that_lane_alone(
    masks: LaneMasks,
) -> None:
    masks.start(start(0, "abc", b"ax"))
    masks.start(start(1, "abc", b"a"))
    found = masks.take((0, 1))
    assert isinstance(found[0], GrammarFault)
    assert found[0].code is ErrorCode.GRAMMAR_REPLAY
    assert allowed(found[1]) == [ord("b")]


def test_a_constraint_that_cannot_be_compiled_or_breaks_later_is_a_fault_of_that_lane(
    masks: LaneMasks,
) -> None:
    masks.start(start(0, "*"))
    masks.start(start(1, "ab"))
    found = masks.take((0, 1))
    assert isinstance(found[0], GrammarFault)
    assert found[0].code is ErrorCode.INVALID_GRAMMAR
    masks.advance({1: ord("z")})
    broken = masks.take((1,))[1]
    assert isinstance(broken, GrammarFault)
    assert broken.code is ErrorCode.INVALID_GRAMMAR


def test_without_grammars_a_constraint_is_a_fault_and_the_rest_is_free() -> None:
    masks = LaneMasks(None)
    assert masks.start(start(0, None)) is None
    fault = masks.start(start(1, "a"))
    assert fault is not None
    assert (fault.lane, fault.code) == (1, ErrorCode.UNSUPPORTED)
    masks.close()
