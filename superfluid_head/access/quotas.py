"""What named keys may use at once and a minute: requests in flight, requests and tokens a minute. Pure: names and times in.

Limits are those of the caller as its key has them now, so a policy that is read again holds from the next request on, and what
was used until then still counts. Requests a minute are refused beforehand. Tokens are charged when they are used: a key whose
minute is used up is refused, and one that used more than it had waits longer. Slots are held by contexts and come back however
those are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from superfluid_core.errors import CapacityError, ErrorCode
from superfluid_head.access.keys import Principal
from superfluid_head.access.ratelimit import MS_NS, SECOND_NS

MINUTE_NS = 60 * SECOND_NS
NAMES_KEPT_MAX = 4_096
SLOT_RETRY_MS = 1_000


class Quotas:
    """What every key has used. Event-loop only."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._requests_full_ns: dict[str, int] = {}
        self._tokens_full_ns: dict[str, int] = {}

    def in_flight(self, name: str) -> int:
        """Slots that a key holds now."""
        return self._slots.get(name, 0)

    def take_request(self, principal: Principal, now_ns: int) -> None:
        """Count a request. Raises CapacityError when the minute has no more of them, or no tokens any more."""
        wait_ns = self._wait_ns(principal, now_ns)
        if wait_ns > 0:
            raise CapacityError(
                "this key has used up its minute",
                code=ErrorCode.RATE_LIMIT_EXCEEDED,
                retry_after_ms=-(-wait_ns // MS_NS),
            )
        if principal.rate_limit_rpm:
            full_ns = max(self._requests_full_ns.get(principal.name, 0), now_ns)
            cost_ns = MINUTE_NS // principal.rate_limit_rpm
            _keep(self._requests_full_ns, principal.name, full_ns + cost_ns, now_ns)

    def _wait_ns(self, principal: Principal, now_ns: int) -> int:
        """Return how long it is until a request may be made, 0 or less for now."""
        waits = [0]
        if principal.rate_limit_rpm:
            full_ns = max(self._requests_full_ns.get(principal.name, 0), now_ns)
            waits.append(full_ns + MINUTE_NS // principal.rate_limit_rpm - now_ns - MINUTE_NS)
        if principal.tokens_per_minute:
            owed_ns = self._tokens_full_ns.get(principal.name, 0) - now_ns
            # a token has to be left, or the request could not even begin
            waits.append(owed_ns + MINUTE_NS // principal.tokens_per_minute - MINUTE_NS)
        return max(waits)

    def charge(self, principal: Principal, tokens: int, now_ns: int) -> None:
        """Charge tokens that were used."""
        if not principal.tokens_per_minute or tokens <= 0:
            return
        full_ns = max(self._tokens_full_ns.get(principal.name, 0), now_ns)
        cost_ns = tokens * MINUTE_NS // principal.tokens_per_minute
        _keep(self._tokens_full_ns, principal.name, full_ns + cost_ns, now_ns)

    def take_slots(self, principal: Principal, count: int = 1) -> None:
        """Take `count` slots, to be given back. Raises CapacityError when the key has fewer left."""
        name, used = principal.name, self._slots.get(principal.name, 0)
        if principal.max_concurrent and count and used + count > principal.max_concurrent:
            raise CapacityError(
                f"this key may have {principal.max_concurrent} requests and choices at once",
                code=ErrorCode.CONCURRENCY_LIMIT_EXCEEDED,
                retryable=count < principal.max_concurrent or count == 1,
                retry_after_ms=SLOT_RETRY_MS,
            )
        self._slots[name] = used + count

    def give_slots(self, principal: Principal, count: int = 1) -> None:
        """Give them back."""
        self._slots[principal.name] -= count
        if not self._slots[principal.name]:
            del self._slots[principal.name]

    @contextmanager
    def hold(self, principal: Principal, count: int = 1) -> Iterator[None]:
        """Hold `count` slots while the context lasts. Raises CapacityError when the key has fewer left."""
        self.take_slots(principal, count)
        try:
            yield
        finally:
            self.give_slots(principal, count)


def _keep(book: dict[str, int], name: str, full_ns: int, now_ns: int) -> None:
    book[name] = full_ns
    if len(book) > NAMES_KEPT_MAX:
        for other in [each for each, until_ns in book.items() if until_ns <= now_ns]:
            del book[other]
