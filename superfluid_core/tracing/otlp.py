"""Sends spans to a collector, OTLP over HTTP, by the OpenTelemetry SDK: the only module that imports it.

Spans wait in a bounded queue of the SDK's own thread; when the collector is away the oldest are dropped and counted, and no request
waits or fails. Times of our monotonic clock become wall time by an offset taken once. A collector on this machine is reached
past any proxy. The SDK reads OTEL_EXPORTER_OTLP_HEADERS and the like for what a collector wants beside an address.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import requests
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from superfluid_core.clock import Clock, epoch_offset_ns
from superfluid_core.logs import log
from superfluid_core.tracing.context import Field, Kind, Span, TraceContext
from superfluid_core.tracing.options import TraceSettings

QUEUE_MAX = 4_096
BATCH_MAX = 256
EVERY_MS = 1_000
EXPORT_S = 5.0
CLOSE_S = 2.0
EVENTS_MAX = 64
FIELDS_MAX = 64
CHARS_MAX = 256

_logger = logging.getLogger(__name__)
_KINDS = {
    Kind.INTERNAL: trace.SpanKind.INTERNAL,
    Kind.SERVER: trace.SpanKind.SERVER,
    Kind.CLIENT: trace.SpanKind.CLIENT,
}


class _Counted(SpanExporter):
    """An exporter that counts what it was handed and what became of it."""

    def __init__(self, inner: SpanExporter, where: str) -> None:
        self._inner = inner
        self._where = where
        self._is_away = False
        self.handed = self.exported = self.failed = 0
        self._is_shut = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.handed += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            self._note(len(spans), is_sent=result is SpanExportResult.SUCCESS)
        return result

    def _note(self, count: int, *, is_sent: bool) -> None:
        """Count a batch; the log hears when the collector goes and when it is back, not of every batch."""
        if is_sent:
            self.exported += count
        else:
            self.failed += count
        if is_sent and self._is_away:
            log(_logger, "info", "the collector of traces is back", failed=self.failed)
        elif not is_sent and not self._is_away:
            log(_logger, "warning", "the collector of traces does not take them", where=self._where)
        self._is_away = not is_sent

    def shutdown(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            self._inner.shutdown()


class _Queue(BatchSpanProcessor):
    """The SDK's bounded queue and thread, with a count of what did not fit."""

    def __init__(self, exporter: _Counted, queue_max: int) -> None:
        super().__init__(exporter, queue_max, EVERY_MS, min(BATCH_MAX, queue_max))
        self._counted = exporter
        self._room = queue_max
        self.ended = self.dropped = 0

    def close(self) -> None:
        self.shutdown()  # type: ignore[no-untyped-call]

    def on_end(self, span: ReadableSpan) -> None:
        self.ended += 1
        if self.ended - self.dropped - self._counted.handed > self._room:
            self.dropped += 1
        super().on_end(span)


class _Span:
    """A span of the SDK under our protocol."""

    def __init__(self, span: trace.Span, tracer: trace.Tracer, offset_ns: int) -> None:
        self._span = span
        self._tracer = tracer
        self._offset_ns = offset_ns

    @property
    def context(self) -> TraceContext:
        found = self._span.get_span_context()
        return TraceContext(found.trace_id, found.span_id, found.trace_flags.sampled)

    def child(
        self,
        name: str,
        fields: Mapping[str, Field],
        kind: Kind = Kind.INTERNAL,
        began_ns: int | None = None,
    ) -> Span:
        made = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span, Context()),
            _KINDS[kind],
            fields,
            start_time=self._wall(began_ns),
        )
        return _Span(made, self._tracer, self._offset_ns)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def note(self, fields: Mapping[str, Field]) -> None:
        self._span.set_attributes(fields)

    def event(self, name: str, fields: Mapping[str, Field]) -> None:
        self._span.add_event(name, fields)

    def end(self, error: str = "", ended_ns: int | None = None) -> None:
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error[:CHARS_MAX])
        if self._span.is_recording():
            self._span.end(self._wall(ended_ns))

    def _wall(self, at_ns: int | None) -> int | None:
        return None if at_ns is None else at_ns + self._offset_ns


class OtlpTracer:
    """Begins traces. `close` once, when nothing is traced any more."""

    def __init__(
        self,
        settings: TraceSettings,
        facts: Mapping[str, str],
        clock: Clock,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        # a collector that is away is counted, not told with every batch
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        session = requests.Session()
        session.trust_env = not settings.is_loopback
        exporter = OTLPSpanExporter(settings.endpoint, timeout=EXPORT_S, session=session)
        self._counted = _Counted(exporter, urlsplit(settings.endpoint).netloc.rpartition("@")[2])
        self._queue = _Queue(self._counted, queue_max)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.share)),
            resource=Resource.create(dict(facts)),
            shutdown_on_exit=False,
            span_limits=SpanLimits(
                max_span_attributes=FIELDS_MAX,
                max_events=EVENTS_MAX,
                max_span_attribute_length=CHARS_MAX,
            ),
        )
        self._provider.add_span_processor(self._queue)
        self._tracer = self._provider.get_tracer("superfluid")
        self._offset_ns = epoch_offset_ns(clock)

    def root(
        self,
        name: str,
        parent: TraceContext | None,
        fields: Mapping[str, Field],
        began_ns: int | None = None,
    ) -> Span | None:
        around = Context()
        if parent is not None:
            flags = trace.TraceFlags(int(parent.is_sampled))
            theirs = trace.SpanContext(
                parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags
            )
            around = trace.set_span_in_context(trace.NonRecordingSpan(theirs), around)
        start_ns = None if began_ns is None else began_ns + self._offset_ns
        made = self._tracer.start_span(
            name, around, trace.SpanKind.SERVER, fields, start_time=start_ns
        )
        return _Span(made, self._tracer, self._offset_ns) if made.is_recording() else None

    def counts(self) -> Mapping[str, int]:
        counted = self._counted
        return {
            "exported": counted.exported,
            "failed": counted.failed,
            "dropped": self._queue.dropped,
        }

    def close(self) -> None:
        # the SDK waits for half a minute; what does not come away in time is given up with the process
        closing = threading.Thread(target=self._queue.close, name="otlp-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        self._counted.shutdown()
