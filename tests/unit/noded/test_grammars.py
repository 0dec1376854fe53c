"""Constrained sessions on a real node: masked tokens, refusals before a lane, replays, and neighbours that notice nothing."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from superfluid_core.errors import ErrorCode, InvalidRequestError
from superfluid_core.grammar.compiler import Grammars, vocabulary_of
from superfluid_core.scheduler.plan import Cancel, Effect, Input, Reject, SetQos, Submit
from superfluid_core.session import (
    FinishReason,
    Grammar,
    GrammarKind,
    QosClass,
    SamplingParams,
    SessionKey,
    SessionSpec,
)
from superfluid_core.wire.messages import CancelSession, CloseReason
from superfluid_noded.grammars import WAITING_MAX, GrammarDesk
from tests.unit.noded.conftest import TEXTS, NodeRig, check

END = TEXTS.vocabulary - 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
PERSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


def grammars() -> Grammars:
    return Grammars(lambda: vocabulary_of(TEXTS, TEXTS.vocabulary))


def text_of(ids: list[int]) -> str:
    return bytes(token for token in ids if token != END).decode()


def test_a_constrained_session_ends_with_valid_json_and_its_neighbours_are_as_ever() -> None:
    alone: list[list[int]] = []

    async def plain(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, prompt="plain", max_output=24)
        await head.until(lambda: head.is_finished(1))
        alone.append(head.ids(1))

    async def mixed(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, prompt="plain", max_output=24)
        for session in (2, 3, 4):
            sampling = SamplingParams(seed=session)
            head.open(session, grammar=PERSON, max_output=200, sampling=sampling)
        await head.until(lambda: all(head.is_finished(n) for n in (1, 2, 3, 4)))
        assert head.ids(1) == alone[0]
        for session in (2, 3, 4):
            row = head.rows(session)[-1]
            assert (row.finish, row.stop_id) == (FinishReason.STOP, END)
            found = json.loads(text_of(head.ids(session)))
            assert set(found) == {"name", "n", "tags"}
            assert len(found["name"]) <= 6

    check(plain)
    check(mixed, grammars=grammars())


def test_a_session_that_moves_at_any_token_goes_on_as_if_it_had_not() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, grammar=PERSON, max_output=200)
        await head.until(lambda: head.is_finished(1))
        whole = head.ids(1)
        for cut in range(1, len(whole)):
            session = 10 + cut
            head.open(session, grammar=PERSON, max_output=200, delivered=tuple(whole[:cut]))
            await head.until(partial(head.is_finished, session))
            rest = [token for row in head.rows(session) for token in row.ids]
            assert whole[:cut] + rest == whole

    check(body, grammars=grammars())


def test_delivered_ids_that_the_constraint_rejects_end_with_grammar_replay() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, grammar=PERSON, max_output=64, delivered=tuple(b"hello"))
        head.open(2, max_output=8)
        await head.until(lambda: head.closed(1) and head.is_finished(2))
        closed = head.closed(1)
        assert closed is not None
        assert (closed.reason, closed.code) == (CloseReason.ERROR, ErrorCode.GRAMMAR_REPLAY)

    check(body, grammars=grammars())


def test_a_wrong_constraint_is_refused_before_it_has_a_lane_and_the_node_serves_on() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        for number, pattern in enumerate(("*", "([a-z", r"(a)\1")):
            head.open(number + 1, grammar=Grammar(GrammarKind.REGEX, pattern))
        head.open(9, grammar=Grammar(GrammarKind.REGEX, "[0-9]{3}"))
        await head.until(lambda: head.is_finished(9) and all(head.refused(n) for n in (1, 2, 3)))
        assert {head.refused(n).code for n in (1, 2, 3)} == {ErrorCode.INVALID_GRAMMAR}  # type: ignore[union-attr]
        assert len(text_of(head.ids(9))) == 3

    check_with_desk(body)


def test_a_constraint_that_leaves_no_token_fails_its_own_session_only() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        grammar = Grammar(GrammarKind.REGEX, "abc")
        banned = SamplingParams(seed=1, allowed_token_ids=(ord("x"),))
        head.open(1, grammar=grammar, sampling=banned)
        head.open(2, grammar=grammar)
        await head.until(lambda: head.closed(1) and head.is_finished(2))
        closed = head.closed(1)
        assert closed is not None
        assert closed.code is ErrorCode.INVALID_REQUEST
        assert text_of(head.ids(2)) == "abc"

    check(body, grammars=grammars())


def test_a_minimum_behind_the_end_of_a_constraint_is_filled_with_ends_and_faults_nobody() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, grammar=Grammar(GrammarKind.REGEX, "ab"), min_output=4)
        await head.until(lambda: head.is_finished(1))
        assert head.ids(1) == [*b"ab", END, END, END]

    check(body, grammars=grammars())


def test_a_script_says_what_the_constraint_allows_and_is_corrected_elsewhere() -> None:
    script = json.dumps({"match": "hello", "pieces": ["a", "x", "c", {"eos": True}]})

    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, grammar=Grammar(GrammarKind.REGEX, "abc"))
        await head.until(lambda: head.is_finished(1))
        assert text_of(head.ids(1)) == "abc"

    check(body, script, grammars=grammars())


def check_with_desk(body: Any) -> None:
    """Run against a node whose desk compiles, as a built node's does."""
    made = grammars()

    async def with_desk(rig: NodeRig) -> None:
        rig.node.grammars.add(("m",), made)
        await body(rig)
        assert rig.node.grammars.waiting == 0
        rig.node.grammars.close()

    check(with_desk, grammars=made)


def test_a_session_cancelled_while_it_is_compiled_ends_like_any_other() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        schema = {"enum": [f"value {n}" for n in range(4_000)]}
        head.open(1, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        head.link.send(CancelSession(1, 1, "gone"))
        await head.until(lambda: head.closed(1))
        closed = head.closed(1)
        assert closed is not None
        assert closed.reason is CloseReason.CANCELLED

    check_with_desk(body)


class _SlowGrammars(Grammars):
    """Has nothing, and compiles when it is told to."""

    def has(self, grammar: Grammar) -> bool:
        return False

    def refusal(self, grammar: Grammar) -> InvalidRequestError | None:
        return None


def test_the_desk_keeps_the_order_of_a_held_session_and_its_line_is_bounded() -> None:
    def spec(number: int) -> SessionSpec:
        grammar = Grammar(GrammarKind.REGEX, "a")
        return SessionSpec(SessionKey("h", number), "m", (1,), 4, grammar=grammar)

    async def main() -> None:
        passed: list[Input] = []
        told: list[Effect] = []
        desk = GrammarDesk(lambda *inputs: passed.extend(inputs), told.extend)
        desk.add(("m",), _SlowGrammars(lambda: vocabulary_of(TEXTS, 300)))
        key = SessionKey("h", 0)
        said = (
            Submit(spec(0)),
            SetQos(key, QosClass.BACKGROUND),
            Cancel(SessionKey("h", 99)),
            Cancel(key),
        )
        desk.submit(*said)
        assert passed == [said[2]]
        desk.submit(*(Submit(spec(n)) for n in range(1, WAITING_MAX + 3)))
        assert len(told) == 3
        assert all(isinstance(one, Reject) and one.retryable for one in told)
        async with asyncio.timeout(5):
            while desk.waiting:  # noqa: ASYNC110 - looks into the desk, which sets no event for tests
                await asyncio.sleep(0.005)
        assert passed[1:4] == [said[0], said[1], said[3]]
        assert len(passed) == 3 + WAITING_MAX
        desk.close()

    asyncio.run(main())
