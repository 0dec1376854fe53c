"""The door of the HTTP side, a pure ASGI layer: every request passes it before anything else looks at it.

Owns the request id, the normalised path (the one that is really routed), the Host and Origin rules, the key check
(deny by default, a short list of open paths), and the last word on exceptions. It must not know any endpoint.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from superfluid_core.clock import SECOND, Clock
from superfluid_head.access.keys import KeyRing
from superfluid_head.api.errors import ApiError, internal, unauthorized
from superfluid_head.metrics import HeadMetrics

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping"})
REQUEST_ID_CHARS_MAX = 128

_slashes = re.compile("/{2,}")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GateRules:
    """What the gate judges by. `loopback_ports` are the ports of listeners bound to loopback addresses."""

    keys: KeyRing
    loopback_ports: frozenset[int] = field(default_factory=frozenset)


def normalise(path: str) -> str:
    """One spelling per route: no repeated and no trailing slashes."""
    return _slashes.sub("/", path).rstrip("/") or "/"


def is_loopback(host: str) -> bool:
    """Whether a host name or address literal names this machine's loopback."""
    bare = host.strip("[]").lower().rstrip(".")
    if bare == "localhost" or bare.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def header(scope: Scope, name: bytes) -> str | None:
    """Return the last value of a header, or None."""
    found = None
    for key, value in scope["headers"]:
        if key == name:
            found = value.decode("latin-1").strip()
    return found


def judge_host(scope: Scope, rules: GateRules) -> ApiError | None:
    """Refuse foreign Hosts on loopback listeners (DNS rebinding) and foreign Origins everywhere."""
    server = scope.get("server") or ("", None)
    is_local = server[1] in rules.loopback_ports and is_loopback(str(server[0]))
    host = header(scope, b"host")
    if is_local and host and not is_loopback(_hostname(host)):
        return ApiError(403, "this listener answers only to local names", code="host_refused")
    origin = header(scope, b"origin")
    if origin is None:
        return None
    parts = urlsplit(origin) if len(origin) <= 300 else urlsplit("")
    if parts.netloc and (
        parts.netloc.lower() == (host or "").lower()
        or (is_local and is_loopback(parts.hostname or ""))
    ):
        return None
    return ApiError(403, "requests from other sites are refused", code="origin_refused")


def _hostname(host: str) -> str:
    """Host without its port; IPv6 literals keep their colons."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def request_id(scope: Scope) -> str:
    """Return the inbound id when it is short and visible, else a fresh one; only ever echoed and logged."""
    given = header(scope, b"x-request-id")
    if given and len(given) <= REQUEST_ID_CHARS_MAX and all("!" <= char <= "~" for char in given):
        return given
    return "req-" + secrets.token_hex(12)


class Gate:
    """Wraps the application; see the module's words."""

    def __init__(self, app: ASGIApp, rules: GateRules, metrics: HeadMetrics, clock: Clock) -> None:
        self._app = app
        self._rules = rules
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_ns = self._clock.now_ns()
        reply = _Reply(request_id(scope), send)
        scope["path"] = normalise(scope["path"])
        scope["raw_path"] = scope["path"].encode("utf-8", "replace")
        scope.setdefault("state", {})["request_id"] = reply.request_id
        try:
            await self._handle(scope, receive, reply)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            elapsed_s = (self._clock.now_ns() - started_ns) / SECOND
            self._metrics.request_done(route, reply.status, elapsed_s)

    async def _handle(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        refusal = self._judge(scope)
        try:
            if refusal is None:
                await self._app(scope, receive, reply.send)
        except Exception:  # the outermost edge of a request
            _logger.exception("request %s failed", reply.request_id)
            refusal = internal()
        if refusal is not None and not reply.status:
            await refusal.response()(scope, receive, reply.send)

    def _judge(self, scope: Scope) -> ApiError | None:
        refusal = judge_host(scope, self._rules)
        if refusal is not None:
            return refusal
        principal = self._rules.keys.judge(scope["headers"])
        if principal is None and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            return unauthorized()
        scope["state"]["principal"] = principal
        return None


class _Reply:
    """`send` with the request id on it; remembers the status once it is out."""

    def __init__(self, request_id: str, send: Send) -> None:
        self.request_id = request_id
        self.status = 0
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers: list[Any] = list(message.get("headers", ()))
            headers.append((b"x-request-id", self.request_id.encode("ascii")))
            message = {**message, "headers": headers}
        await self._send(message)
