"""A collector for tests: takes OTLP over HTTP on loopback and keeps the spans, or refuses, or is slow, as it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One span as it arrived."""

    service: str
    instance: str
    name: str
    trace: str
    span: str
    parent: str
    fields: Mapping[str, Any]
    events: tuple[tuple[str, Mapping[str, Any]], ...]
    began_ns: int
    ended_ns: int
    is_error: bool

    @property
    def line(self) -> str:
        shown = " ".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.name} [{self.instance or self.service}] {shown}".rstrip()


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _spans(body: bytes) -> Iterator[Seen]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        facts = _values(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    service=facts["service.name"],
                    instance=facts.get("service.instance.id", ""),
                    name=span.name,
                    trace=span.trace_id.hex(),
                    span=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    fields=_values(span.attributes),
                    events=tuple((event.name, _values(event.attributes)) for event in span.events),
                    began_ns=span.start_time_unix_nano,
                    ended_ns=span.end_time_unix_nano,
                    is_error=span.status.code == 2,
                )


class Receiver:
    """Listens until it is left."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.status = 200
        self.answers = threading.Event()
        self.answers.set()
        self._came = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            """Takes what is posted."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if receiver.status == 200:
                    receiver.take(body)
                receiver.answers.wait(10)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(receiver.status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, body: bytes) -> None:
        with self._came:
            self.spans += _spans(body)
            self._came.notify_all()

    def of(self, trace: str) -> list[Seen]:
        return [span for span in self.spans if span.trace == trace]

    def wait_for(self, trace: str, names: Mapping[str, int], timeout_s: float = 20.0) -> list[Seen]:
        """Wait until a trace has so many spans of these names."""

        def is_there() -> bool:
            found = [span.name.split()[0] for span in self.of(trace)]
            return all(found.count(name) >= count for name, count in names.items())

        with self._came:
            assert self._came.wait_for(is_there, timeout_s), self.tree(trace)
        return self.of(trace)

    def tree(self, trace: str) -> str:
        """The spans of a trace, each under its parent, with their events."""
        found = sorted(self.of(trace), key=lambda span: span.began_ns)
        known = {span.span for span in found}
        lines: list[str] = []

        def add(span: Seen, depth: int) -> None:
            lines.append("  " * depth + span.line)
            for name, fields in span.events:
                shown = " ".join(f"{key}={value}" for key, value in fields.items())
                lines.append("  " * depth + f"    * {name} {shown}".rstrip())
            for child in found:
                if child.parent == span.span:
                    add(child, depth + 1)

        for span in found:
            if span.parent not in known:
                add(span, 0)
        return "\n".join(lines)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
