"""A key's slots: one for every request that may make work, held until its reply has ended, however that ends (access.md, Keys).

Stands between the gate and the routes and knows none of them: whatever is posted counts, but for what steers work that is there
already, so that a key whose slots are all taken can still end one. Further choices of a request take theirs in `run.py`.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from superfluid_core.errors import CapacityError
from superfluid_head.access.keys import Principal
from superfluid_head.access.quotas import Quotas
from superfluid_head.api.errors import from_error
from superfluid_head.api.shapes import is_under
from superfluid_head.api.shapes import reply as shaped

STEERING = ("/v1/sessions", "/v1/fleet")


class Slots:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, quotas: Quotas) -> None:
        self._app = app
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal: Principal | None = scope["state"].get("principal")
        if principal is None or not _makes_work(scope):
            await self._app(scope, receive, send)
            return
        try:
            self._quotas.take_slots(principal)
        except CapacityError as error:
            await shaped(from_error(error), scope)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._quotas.give_slots(principal)


def _makes_work(scope: Scope) -> bool:
    return scope["method"] == "POST" and not any(is_under(scope["path"], path) for path in STEERING)
