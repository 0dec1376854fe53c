"""How a program is told to export traces: two settings, the same for head and node, and what they come to.

Without `--otlp-endpoint` nothing is exported and nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from superfluid_core.clock import Clock
from superfluid_core.errors import ConfigError
from superfluid_core.options import Option
from superfluid_core.tracing.context import Tracer

TRACES_PATH = "/v1/traces"


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"not a number: {text[:40]!r}") from None
    if not 0 <= value <= 1:
        raise ValueError("a share is 0 to 1")
    return value


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or not text.isprintable() or len(text) > 2_000:
        raise ValueError("an OTLP endpoint is http://HOST:PORT or https://HOST:PORT")
    return text


TRACE_OPTIONS = (
    Option("otlp-endpoint", f"Collector that traces are sent to, OTLP over HTTP; without a path, {TRACES_PATH}.  [default: none]",
           _endpoint, metavar="URL"),
    Option("otlp-share", "Share of requests that are traced; one that comes with a traceparent is traced if that says so.",
           _share, 1.0, metavar="0..1"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where spans go, and the share of requests that have any."""

    endpoint: str
    share: float = 1.0

    @property
    def is_loopback(self) -> bool:
        host = urlsplit(self.endpoint).hostname or ""
        return host == "localhost" or host.startswith("127.") or host == "::1"


def trace_settings(value: Mapping[str, Any]) -> TraceSettings | None:
    """Read the two settings; None when no traces are wanted."""
    endpoint: str | None = value["otlp_endpoint"]
    if endpoint is None:
        return None
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + TRACES_PATH
    return TraceSettings(endpoint, value["otlp_share"])


def open_tracer(
    settings: TraceSettings | None, facts: Mapping[str, str], clock: Clock
) -> Tracer | None:
    """Begin to export; None when no traces are wanted. `facts` describe the program. Raises ConfigError without the extra."""
    if settings is None:
        return None
    try:
        from superfluid_core.tracing.otlp import OtlpTracer
    except ImportError:
        text = "--otlp-endpoint needs OpenTelemetry: pip install 'superfluid-fleet[otlp]'"
        raise ConfigError(text) from None
    return OtlpTracer(settings, facts, clock)
