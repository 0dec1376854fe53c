"""Order within a class: who of the waiting is first, by tenant and then within a tenant (scheduler.md).

One small class each behind one protocol. A policy sees sessions and tokens and gives numbers; the queue keeps the
order. Aging is the queue's too: where `ages` is set, a starving session goes before the policy's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from superfluid_core.scheduler.records import Session
from superfluid_core.scheduler.rules import QueueOrder, Rules

_TENANTS_KEPT = 4096
# One token of one unit of weight, divisible by every small weight.
_WHOLE_SHARE = 5_040


class QueuePolicy(Protocol):
    """Smaller numbers first. `tenant_key` may only grow while a tenant is active, or the queue would miss it.

    `ages`: a starving session goes first. `charges`: tokens are counted. `follows_cache`: keys change with what is cached.
    """

    ages: bool
    charges: bool
    follows_cache: bool

    def key(self, session: Session) -> int: ...

    def tenant_key(self, tenant: str) -> int: ...

    def on_arrival(self, session: Session) -> None: ...

    def on_tokens(self, session: Session, prompt: int, output: int) -> None: ...

    def on_finish(self, session: Session) -> None: ...


class Fifo:
    """Arrival; the default."""

    ages = False
    charges = False
    follows_cache = False

    def key(self, session: Session, /) -> int:
        del session
        return 0

    def tenant_key(self, tenant: str, /) -> int:
        del tenant
        return 0

    def on_arrival(self, session: Session, /) -> None:
        """Nothing is kept per session."""

    def on_tokens(self, session: Session, prompt: int, output: int) -> None:
        """Nothing is charged."""

    def on_finish(self, session: Session, /) -> None:
        """Nothing is kept per session."""


class Shortest(Fifo):
    """Least remaining prompt first; long prompts would starve without aging."""

    ages = True
    follows_cache = True

    def key(self, session: Session) -> int:
        return len(session.context) - session.hit_tokens


class LongestPrefix(Fifo):
    """Most cached tokens first."""

    ages = True
    follows_cache = True

    def key(self, session: Session) -> int:
        return -session.hit_tokens


class Fair(Fifo):
    """The tenant that was served least first: a virtual token counter per tenant, charged as tokens are computed.

    A tenant that becomes active is lifted to the smallest counter of the active ones: it has no claim from its idle
    time, and no debt is forgiven by leaving for a moment. A tenant of weight w is charged a w-th of its tokens;
    weights come with the sessions, unless the node has its own for that tenant.
    """

    charges = True

    def __init__(self, prompt_weight: int, output_weight: int, shares: Mapping[str, int]) -> None:
        self._weights = (prompt_weight, output_weight)
        self._shares = dict(shares)
        self._counters: dict[str, int] = {}
        self._active: dict[str, int] = {}

    def tenant_key(self, tenant: str) -> int:
        return self._counters.get(tenant, 0)

    def on_arrival(self, session: Session) -> None:
        tenant = session.spec.tenant
        if tenant not in self._active:
            own = self._counters.get(tenant, 0)
            floor = min((self._counters.get(name, 0) for name in self._active), default=own)
            self._forget_idle()
            self._counters[tenant] = max(own, floor)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def on_tokens(self, session: Session, prompt: int, output: int) -> None:
        tenant = session.spec.tenant
        charge = (prompt * self._weights[0] + output * self._weights[1]) * _WHOLE_SHARE
        owed = charge // self._shares.get(tenant, session.spec.weight)
        self._counters[tenant] = self._counters.get(tenant, 0) + owed

    def on_finish(self, session: Session) -> None:
        tenant = session.spec.tenant
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]

    def _forget_idle(self) -> None:
        if len(self._counters) > _TENANTS_KEPT + len(self._active):
            self._counters = {name: self._counters.get(name, 0) for name in self._active}


_MAKERS: dict[QueueOrder, Callable[[Rules], QueuePolicy]] = {
    QueueOrder.FIFO: lambda _: Fifo(),
    QueueOrder.FAIR: lambda rules: Fair(
        rules.fair_prompt_weight, rules.fair_output_weight, dict(rules.tenant_weights)
    ),
    QueueOrder.SHORTEST: lambda _: Shortest(),
    QueueOrder.PREFIX: lambda _: LongestPrefix(),
}


def make_policy(rules: Rules) -> QueuePolicy:
    return _MAKERS[rules.queue_order](rules)
