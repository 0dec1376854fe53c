"""What a node tells beside tokens: how long the first one took, and its part of a trace; to nobody who would not know it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from superfluid_core.session import FinishReason
from superfluid_core.tracing.context import Field, Kind, Span, TraceContext
from superfluid_core.wire.messages import CancelSession
from superfluid_core.wire.notes import TIMING, TRACE, Timing, Trace
from tests.unit.noded.conftest import NodeRig, check, serving

CONTEXT = TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)


class Recorded:
    """A tracer and its spans: (name, parent's span id, fields, error)."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, int, dict[str, Any], str]] = []

    def root(
        self,
        name: str,
        parent: TraceContext | None,
        fields: Mapping[str, Field],
        began_ns: int | None = None,
    ) -> Span | None:
        assert parent is not None
        return _Recorded(self, name, parent.span_id, fields, began_ns or 0)

    def counts(self) -> Mapping[str, int]:
        return {"exported": len(self.ended)}

    def close(self) -> None:
        """Nothing waits."""


class _Recorded:
    def __init__(
        self, of: Recorded, name: str, parent: int, fields: Mapping[str, Field], began_ns: int
    ) -> None:
        self._of, self._name, self._parent = of, name, parent
        self._fields, self._began_ns = dict(fields), began_ns
        self.context = TraceContext(CONTEXT.trace_id, 99)

    def child(
        self,
        name: str,
        fields: Mapping[str, Field],
        kind: Kind = Kind.INTERNAL,
        began_ns: int | None = None,
    ) -> Span:
        return _Recorded(self._of, name, 99, fields, began_ns or 0)

    def rename(self, name: str) -> None:
        self._name = name

    def note(self, fields: Mapping[str, Field]) -> None:
        self._fields |= fields

    def event(self, name: str, fields: Mapping[str, Field]) -> None:
        """Nodes tell no events."""

    def end(self, error: str = "", ended_ns: int | None = None) -> None:
        assert ended_ns is not None
        assert 0 < self._began_ns <= ended_ns
        self._of.ended.append((self._name, self._parent, self._fields, error))


def test_a_head_that_knows_timing_hears_it_once_before_the_first_token() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link(features=("files", TIMING))
        head.open(max_output=5)
        await head.until(head.is_finished)
        (timing,) = head.of(Timing)
        assert (timing.session, timing.epoch) == (1, 1)
        assert 0 <= timing.queued_us < 5_000_000
        assert 0 < timing.prefill_us < 5_000_000
        kinds = [type(message).__name__ for message in head.messages]
        assert kinds.index("Timing") < kinds.index("Tokens")

    check(body)


def test_an_older_head_hears_none() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link(features=("files", "prefix-shared"))
        head.open(max_output=5)
        await head.until(head.is_finished)
        assert not head.of(Timing)

    check(body)


def traced(rig: NodeRig) -> Recorded:
    recorded = Recorded()
    rig.node.traces.tracer = recorded
    return recorded


def test_a_traced_session_leaves_its_phases_under_the_heads_span() -> None:
    async def body(rig: NodeRig) -> None:
        recorded, head = traced(rig), await rig.link()
        head.link.send(Trace(1, 1, CONTEXT.traceparent))
        head.open(max_output=6)
        await head.until(head.is_finished)
        await rig.until(lambda: recorded.ended)
        assert [name for name, *_ in recorded.ended] == ["queue", "prefill", "decode", "session"]
        *phases, (_, parent, fields, error) = recorded.ended
        assert {phase[1] for phase in phases} == {99}
        assert (parent, error) == (CONTEXT.span_id, "")
        assert fields["superfluid.outcome"] == FinishReason.LENGTH.value
        assert phases[1][2]["tokens"] == 5
        assert phases[1][2]["engine.steps"] >= 1
        assert phases[2][2]["tokens"] == 6

    check(body)


def test_sessions_that_are_not_traced_or_end_early_leave_what_there_is() -> None:
    async def body(rig: NodeRig) -> None:
        recorded, head = traced(rig), await rig.link()
        head.open(max_output=4)
        await head.until(head.is_finished)
        assert recorded.ended == []
        head.link.send(Trace(77, 1, CONTEXT.traceparent))
        head.open(3, max_output=4)
        head.link.send(Trace(2, 1, CONTEXT.traceparent))
        head.open(2, max_output=500)
        await head.until(lambda: head.ids(2))
        head.link.send(CancelSession(2, 1, "client left"))
        await rig.until(lambda: not rig.node.agent.roster.live)
        (session,) = (each for each in recorded.ended if each[0] == "session")
        assert session[2]["superfluid.outcome"] == "cancelled"
        assert session[3] == ""

    check(body, decode_rate=200.0)


def test_a_link_that_is_lost_ends_the_span_with_an_error() -> None:
    async def main() -> None:
        async with serving(decode_rate=200.0) as rig:
            recorded, head = traced(rig), await rig.link()
            head.link.send(Trace(1, 1, CONTEXT.traceparent))
            head.open(max_output=3_000)
            await head.until(head.ids)
            head.link.abort("gone")
            await rig.until(lambda: recorded.ended)
            assert recorded.ended[-1][3] == "link-lost"

    asyncio.run(main())


def test_only_a_node_that_exports_traces_announces_it() -> None:
    async def main() -> None:
        async with serving() as rig:
            assert TRACE not in rig.node.agent.card.features
        async with serving(flags={"otlp_endpoint": "http://127.0.0.1:9"}) as rig:
            assert TRACE in rig.node.agent.card.features
            assert (
                'superfluid_spans_total{outcome="exported"} 0.0'
                in rig.node.metrics.expose().decode()
            )
            await rig.node.traces.close()

    asyncio.run(main())
