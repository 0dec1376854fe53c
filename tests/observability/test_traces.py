"""Traces without a fleet: what is read of `traceparent`, what a collector that is away costs, what crosses the link to whom."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_core.clock import MS, SystemClock
from superfluid_core.errors import ConfigError
from superfluid_core.session import SamplingParams
from superfluid_core.tracing.context import (
    SPAN,
    Field,
    Kind,
    Span,
    TraceContext,
    parse_traceparent,
)
from superfluid_core.tracing.options import TraceSettings, open_tracer, trace_settings
from superfluid_core.tracing.otlp import OtlpTracer
from superfluid_core.wire.notes import TRACE, Trace
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.fleet.spans import ChoiceSpans
from tests.observability.receiver import Receiver

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_a_context_survives_its_way_as_text(trace: int, span: int, is_sampled: bool) -> None:
    context = TraceContext(trace, span, is_sampled)
    assert parse_traceparent(context.traceparent) == context


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        PARENT.upper(),
        PARENT + "-more",
        "ff" + PARENT[2:],
        PARENT[:-1],
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "01" + PARENT[2:] + "x",
    ],
)
def test_what_is_no_traceparent_is_nobodys(text: str | None) -> None:
    assert parse_traceparent(text) is None


def test_a_later_version_may_say_more() -> None:
    context = parse_traceparent("01" + PARENT[2:] + "-something")
    assert context == parse_traceparent(PARENT)


def settings(endpoint: str, share: float = 1.0) -> TraceSettings:
    found = trace_settings({"otlp_endpoint": endpoint, "otlp_share": share})
    assert found is not None
    return found


def tracer(endpoint: str, share: float = 1.0, queue_max: int = 64) -> OtlpTracer:
    facts = {"service.name": "test"}
    return OtlpTracer(settings(endpoint, share), facts, SystemClock(), queue_max)


def test_an_endpoint_without_a_path_gets_the_usual_one() -> None:
    assert settings("http://c:4318").endpoint == "http://c:4318/v1/traces"
    assert settings("http://c:4318/").endpoint == "http://c:4318/v1/traces"
    assert settings("http://c/otlp/v1/traces").endpoint == "http://c/otlp/v1/traces"
    assert trace_settings({"otlp_endpoint": None, "otlp_share": 1.0}) is None


def test_nothing_of_opentelemetry_is_imported_unless_a_collector_is_named() -> None:
    code = (
        "import sys, superfluid_head.server, superfluid_head.cli\n"
        "print(sorted(n for n in sys.modules if n.startswith('opentelemetry.sdk')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_without_the_extra_the_program_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "superfluid_core.tracing.otlp", None)
    assert open_tracer(None, {}, SystemClock()) is None
    with pytest.raises(ConfigError, match=r"superfluid-fleet\[otlp\]"):
        open_tracer(settings("http://127.0.0.1:1"), {}, SystemClock())


def test_spans_arrive_under_their_parents_with_the_times_that_were_given() -> None:
    with Receiver() as receiver:
        made = tracer(receiver.endpoint)
        now_ns = SystemClock().now_ns()
        root = made.root("POST", parse_traceparent(PARENT), {"a": 1}, now_ns - 500 * MS)
        assert root is not None
        child = root.child("choice 0", {"b": "x"}, Kind.CLIENT, now_ns - 400 * MS)
        child.event("moved", {"cause": "drain"})
        child.end("lost", now_ns - 100 * MS)
        child.end("", now_ns)
        root.rename("POST /v1/x")
        root.end("", now_ns)
        made.close()
        outer, inner = sorted(receiver.spans, key=lambda span: span.name)
        assert (outer.name, outer.trace, outer.parent) == (
            "POST /v1/x",
            PARENT[3:35],
            PARENT[36:52],
        )
        assert inner.parent == outer.span
        assert inner.is_error
        assert inner.events == (("moved", {"cause": "drain"}),)
        assert inner.ended_ns - inner.began_ns == 300 * MS
        assert abs(outer.ended_ns - time.time_ns()) < 60_000 * MS
        assert made.counts() == {"exported": 2, "failed": 0, "dropped": 0}


def test_a_share_of_0_traces_only_who_asks_for_it_and_whoever_asks_not_to_is_not() -> None:
    with Receiver() as receiver:
        made = tracer(receiver.endpoint, share=0.0)
        assert made.root("POST", None, {}) is None
        asked = made.root("POST", parse_traceparent(PARENT), {})
        assert asked is not None
        asked.end()
        made.close()
        every = tracer(receiver.endpoint, share=1.0)
        assert every.root("POST", parse_traceparent(PARENT[:-1] + "0"), {}) is None
        every.close()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("is_there", [False, True])
def test_a_collector_that_is_away_or_refuses_holds_nobody_up_and_the_loss_is_counted(
    is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with Receiver() as receiver:
        receiver.status = 503
        where = receiver.endpoint if is_there else f"http://127.0.0.1:{closed_port()}"
        made = tracer(where, queue_max=64)
        slowest_s = 0.0
        for number in range(1_000):
            began_s = time.thread_time()
            span = made.root("POST", None, {"n": number})
            assert span is not None
            span.end()
            slowest_s = max(slowest_s, time.thread_time() - began_s)
        assert slowest_s < 0.05
        began_s = time.monotonic()
        made.close()
        assert time.monotonic() - began_s < 6.0
        counts = made.counts()
        assert counts["exported"] == 0
        assert counts["dropped"] > 500
        assert counts["dropped"] + counts["failed"] <= 1_000
        deadline_s = time.monotonic() + 10  # the thread that was given up ends in its own time
        while "does not take them" not in caplog.text and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert caplog.text.count("the collector of traces does not take them") == 1


class Kept:
    """A span that remembers."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log
        self.context = TraceContext(7, len(log) + 1)
        log.append(f"begin {name}")

    def child(
        self,
        name: str,
        fields: Mapping[str, Field],
        kind: Kind = Kind.INTERNAL,
        began_ns: int | None = None,
    ) -> Span:
        return Kept(name, self._log)

    def rename(self, name: str) -> None:
        self._name = name

    def note(self, fields: Mapping[str, Field]) -> None:
        """Let it pass."""

    def event(self, name: str, fields: Mapping[str, Field]) -> None:
        self._log.append(f"{name} {fields.get('node', fields.get('cause', ''))}".rstrip())

    def end(self, error: str = "", ended_ns: int | None = None) -> None:
        self._log.append(f"end {self._name} {error}".rstrip())


REQUEST = GenerationRequest("r", "m", (1, 2), SamplingParams(), 8)


def test_the_context_crosses_the_link_only_to_a_node_that_announced_it() -> None:
    log: list[str] = []
    around = SPAN.set(Kept("POST", log))
    try:
        spans = ChoiceSpans(REQUEST)
    finally:
        SPAN.reset(around)
    spans.placed("a", 1, "new", 0)
    assert spans.opened(5, 1, "a", ("files", "stats")) is None
    spans.left("link cut")
    spans.placed("b", 2, "link cut", 3)
    note = spans.opened(5, 2, "b", ("files", TRACE))
    assert isinstance(note, Trace)
    assert (note.session, note.epoch) == (5, 2)
    context = parse_traceparent(note.context)
    assert context is not None
    assert context.trace_id == 7
    spans.close()
    spans.close()
    assert log == [
        *("begin POST", "begin choice 0", "placed a", "begin placement a", "end placement a"),
        *("placed b", "begin placement b", "end placement b", "end choice 0"),
    ]


def test_a_request_that_is_not_traced_makes_no_span() -> None:
    spans = ChoiceSpans(REQUEST)
    spans.placed("a", 1, "new", 0)
    assert spans.opened(5, 1, "a", (TRACE,)) is None
    spans.close()
