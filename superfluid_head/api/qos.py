"""As what a request is served: its class, whether alone, and how long it may wait for its start (access.md, Headers).

The class comes from the header, the key or the default, in this order; a key's ceiling bounds what a header may ask for.
Requests of the `completion` class pass a token bucket per client and may have to start in time: an editor that typed on
does not want the old answer. Everything here refuses before the fleet is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from superfluid_core.clock import MS
from superfluid_core.errors import CapacityError, ErrorCode
from superfluid_core.options import parse_bool
from superfluid_core.session import QosClass
from superfluid_head.access.keys import Principal
from superfluid_head.access.ratelimit import RateLimit, TokenBuckets
from superfluid_head.api.errors import FORBIDDEN, ApiError, invalid

QOS_HEADER = "x-superfluid-qos"
ALONE_HEADER = "x-superfluid-batch-invariant"


@dataclass(frozen=True, slots=True)
class QosRules:
    """What the operator allows. `completions` bounds the completion class; a deadline of 0 is none."""

    default: QosClass = QosClass.AGENT
    has_header: bool = True
    may_be_alone: bool = False
    completions: RateLimit = field(default_factory=lambda: RateLimit(10, 20))
    completion_deadline_ms: int = 0


@dataclass(frozen=True, slots=True)
class Service:
    """How one request is to be served. `start_by_ns` is a time of the head's monotonic clock."""

    qos: QosClass
    batch_invariant: bool = False
    start_by_ns: int | None = None


class QosDesk:
    """Judges requests by the operator's rules."""

    def __init__(self, rules: QosRules) -> None:
        self.rules = rules
        self._completions = TokenBuckets(rules.completions)

    def judge(
        self,
        headers: Mapping[str, str],
        principal: Principal,
        client: str,
        now_ns: int,
        default: QosClass | None = None,
    ) -> Service:
        """Raise ApiError (400, 403) or CapacityError (429 for a client's too many completions).

        `default` is the class of a kind of request, where neither header nor key say one.
        """
        qos = self._qos(headers, principal, default)
        is_alone = self._is_alone(headers, principal)
        if qos is not QosClass.COMPLETION:
            return Service(qos, is_alone)
        wait_ms = self._completions.take(client, now_ns)
        if wait_ms is not None:
            raise CapacityError(
                "too many completions a second from this client",
                code=ErrorCode.RATE_LIMIT_EXCEEDED,
                retry_after_ms=wait_ms,
            )
        deadline_ms = self.rules.completion_deadline_ms
        return Service(qos, is_alone, now_ns + deadline_ms * MS if deadline_ms else None)

    def judge_change(self, text: str, principal: Principal) -> QosClass:
        """Judge a class that a live session is to get. Raises ApiError (400, 403)."""
        qos = _parse(text, "class")
        _judge_ceiling(qos, principal)
        return qos

    def _qos(
        self, headers: Mapping[str, str], principal: Principal, default: QosClass | None
    ) -> QosClass:
        asked = headers.get(QOS_HEADER)
        has_ceiling = principal.max_qos is not None
        if asked is not None and (self.rules.has_header or has_ceiling):
            qos = _parse(asked, QOS_HEADER)
            _judge_ceiling(qos, principal)
            return qos
        if principal.qos is not None or default is None:
            return self.rules.default if principal.qos is None else principal.qos
        return default if principal.max_qos is None else max(default, principal.max_qos)

    def _is_alone(self, headers: Mapping[str, str], principal: Principal) -> bool:
        asked = headers.get(ALONE_HEADER)
        if asked is None:
            return False
        try:
            is_alone = parse_bool(asked)
        except ValueError:
            raise invalid(f"{ALONE_HEADER}: true or false", param=ALONE_HEADER) from None
        if is_alone and not (self.rules.may_be_alone or principal.batch_invariant):
            raise ApiError(
                403,
                "batch-invariant lanes are not allowed here (--http-allow-batch-invariant)",
                code="batch_invariant_not_allowed",
                type=FORBIDDEN,
            )
        return is_alone


def _parse(text: str, where: str) -> QosClass:
    try:
        return QosClass.parse(text)
    except ValueError as error:
        words = str(error).encode("ascii", "backslashreplace").decode()
        raise invalid(f"{where}: {words}", param=where) from None


def _judge_ceiling(qos: QosClass, principal: Principal) -> None:
    """Refuse a better class than the key's ceiling; a worse one is always allowed."""
    best = principal.max_qos
    if best is not None and qos < best:
        raise ApiError(
            403,
            f"this key may ask for {best.label} at best",
            code="class_not_allowed",
            type=FORBIDDEN,
        )


def client_of(principal: Principal, address: str | None) -> str:
    """Who is counted: the key's name, or the address of somebody without one."""
    return principal.name if principal.is_named else f"{principal.name}@{address or ''}"
