"""The door of the HTTP side, a pure ASGI layer: every request passes it before anything else looks at it.

Owns the request id, the normalised path (the one that is really routed), who asks and from where, the Host and Origin rules, the key
check (deny by default, a short list of open paths), the rates of addresses and keys, and the last word on exceptions. It must not
know any endpoint.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from superfluid_core.clock import SECOND, Clock
from superfluid_core.errors import CapacityError, ErrorCode
from superfluid_core.link.addresses import KNOWN_MAX
from superfluid_core.link.addresses import is_loopback as is_loopback_address
from superfluid_core.tracing.context import SPAN, Tracer
from superfluid_head.access.addresses import Proxies, counted_as
from superfluid_head.access.keys import CALLER, KeyRing, Principal, has_secret
from superfluid_head.access.origins import Headers, Origins
from superfluid_head.access.quotas import Quotas
from superfluid_head.access.ratelimit import RateLimit, TokenBuckets
from superfluid_head.api.errors import ApiError, from_error, internal, unauthorized
from superfluid_head.api.shapes import reply as shaped
from superfluid_head.api.spans import begin_request, end_request
from superfluid_head.dashboard.pages import PATHS
from superfluid_head.metrics import HeadMetrics

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping"}) | PATHS
REQUEST_ID_CHARS_MAX = 128
WRONG_KEYS_PER_MINUTE = 10

_slashes = re.compile("/{2,}")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GateRules:
    """What the gate judges by. `loopback_ports` are the ports of listeners bound to loopback addresses, `side_door` the socket of a worker."""

    keys: KeyRing
    quotas: Quotas
    loopback_ports: frozenset[int] = field(default_factory=frozenset)
    rate_limit_rpm: int = 0
    proxies: Proxies = field(default_factory=Proxies)
    origins: Origins = field(default_factory=Origins)
    side_door: str = ""


def is_side_door(scope: Scope, path: str) -> bool:
    """Whether a request came in by the socket at `path`, where only this program's other workers do."""
    return bool(path) and scope.get("server") == (path, None)


def normalise(path: str) -> str:
    """One spelling per route: no repeated and no trailing slashes."""
    return _slashes.sub("/", path).rstrip("/") or "/"


@lru_cache(KNOWN_MAX)
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
    if origin is None or rules.origins.allow(origin):
        return None
    try:
        parts = urlsplit(origin) if len(origin) <= 300 else urlsplit("")
        name = parts.hostname or ""
    except ValueError:
        parts, name = urlsplit(""), ""
    if parts.netloc and (
        parts.netloc.lower() == (host or "").lower() or (is_local and is_loopback(name))
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

    def __init__(
        self,
        app: ASGIApp,
        rules: GateRules,
        metrics: HeadMetrics,
        clock: Clock,
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._rules = rules
        self._metrics = metrics
        self._clock = clock
        rpm = rules.rate_limit_rpm
        self._addresses = TokenBuckets(RateLimit(rpm / 60, rpm))
        self._wrong_keys = TokenBuckets(
            RateLimit(WRONG_KEYS_PER_MINUTE / 60, WRONG_KEYS_PER_MINUTE)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_ns = self._clock.now_ns()
        reply = _Reply(request_id(scope), self._readable_by(scope), send)
        scope["path"] = normalise(scope["path"])
        scope["raw_path"] = scope["path"].encode("utf-8", "replace")
        scope.setdefault("state", {})["request_id"] = reply.request_id
        self._find_client(scope)
        caller, span = CALLER.set(None), begin_request(self._tracer, scope, started_ns)
        around = SPAN.set(span)
        try:
            await self._handle(scope, receive, reply)
        finally:
            SPAN.reset(around)
            CALLER.reset(caller)
            route = getattr(scope.get("route"), "path", "other")
            end_request(span, scope, route, reply.status)
            elapsed_s = (self._clock.now_ns() - started_ns) / SECOND
            self._metrics.request_done(route, reply.status, elapsed_s)
            principal: Principal | None = scope["state"].get("principal")
            if principal is not None:
                self._metrics.tenant_done(principal.name, reply.status)

    async def _handle(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        refusal = self._judge(scope)
        try:
            if refusal is None and not self._is_preflight(scope):
                await self._app(scope, receive, reply.send)
            elif refusal is None:
                await self._answer_preflight(scope, reply)
        except Exception:  # the outermost edge of a request
            _logger.exception("request %s failed", reply.request_id)
            refusal = internal()
        if refusal is not None and not reply.status:
            await shaped(refusal, scope)(scope, receive, reply.send)

    def _judge(self, scope: Scope) -> ApiError | None:
        refusal = judge_host(scope, self._rules)
        if refusal is not None:
            return refusal
        address = scope["client"][0] if scope.get("client") else ""
        try:
            principal = self._who(scope, address)
            if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
                if principal is None:
                    return unauthorized()
                if not is_side_door(scope, self._rules.side_door):
                    self._take(principal, address)  # else it was counted where it came in
        except CapacityError as error:
            return from_error(error)
        scope["state"]["principal"] = principal
        CALLER.set(principal)
        return None

    def _who(self, scope: Scope, address: str) -> Principal | None:
        """Find the caller. Raises CapacityError for an address that guesses; this machine's own may guess."""
        keys, now_ns = self._rules.keys, self._clock.now_ns()
        headers = scope["headers"]
        if keys.is_empty or is_loopback_address(address) or not has_secret(headers):
            return keys.judge(headers)
        name = counted_as(address)
        wait_ms = self._wrong_keys.wait_ms(name, now_ns)
        if wait_ms:
            raise _too_many("too many wrong keys from this address", wait_ms)
        principal = keys.judge(headers)
        if principal is None:
            self._wrong_keys.take(name, now_ns)
        return principal

    def _take(self, principal: Principal, address: str) -> None:
        """Count the request. Raises CapacityError. Who has a rate of its own is not held to its address's."""
        now_ns = self._clock.now_ns()
        self._rules.quotas.take_request(principal, now_ns)
        if principal.rate_limit_rpm:
            return
        wait_ms = self._addresses.take(counted_as(address), now_ns)
        if wait_ms is not None:
            raise _too_many("too many requests a minute from this address", wait_ms)

    def _find_client(self, scope: Scope) -> None:
        """Put the address of whoever really asks in the place of a trusted proxy's."""
        if scope.get("client"):
            peer, port = scope["client"]
            named = list(_lines(scope, b"x-forwarded-for"))
            found = self._rules.proxies.client(peer, named)
            scope["client"] = (found, port if found == peer else 0)

    def _readable_by(self, scope: Scope) -> Headers:
        """Return what a listed page's browser is told with every reply."""
        origin = header(scope, b"origin")
        if origin is None or not self._rules.origins.allow(origin):
            return []
        return self._rules.origins.headers(origin)

    def _is_preflight(self, scope: Scope) -> bool:
        if scope["method"] != "OPTIONS" or not header(scope, b"access-control-request-method"):
            return False
        return bool(self._readable_by(scope))

    async def _answer_preflight(self, scope: Scope, reply: _Reply) -> None:
        asked = header(scope, b"access-control-request-headers")
        is_private = header(scope, b"access-control-request-private-network") == "true"
        headers = self._rules.origins.preflight(asked, is_private=is_private)
        await reply.send({"type": "http.response.start", "status": 204, "headers": headers})
        await reply.send({"type": "http.response.body", "body": b"", "more_body": False})


def _lines(scope: Scope, name: bytes) -> Iterable[str]:
    return (value.decode("latin-1") for key, value in scope["headers"] if key == name)


def _too_many(words: str, wait_ms: int) -> CapacityError:
    return CapacityError(words, code=ErrorCode.RATE_LIMIT_EXCEEDED, retry_after_ms=wait_ms)


class _Reply:
    """`send` with the request id on it, and what a browser needs; remembers the status once it is out."""

    def __init__(self, request_id: str, extra: Headers, send: Send) -> None:
        self.request_id = request_id
        self.status = 0
        self._extra = extra
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers: list[Any] = list(message.get("headers", ()))
            headers.append((b"x-request-id", self.request_id.encode("ascii")))
            message = {**message, "headers": headers + self._extra}
        await self._send(message)
