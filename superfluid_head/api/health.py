"""Liveness, readiness, metrics and version. Nothing here waits for anything. Metrics show admins all, others their own rows.

`/livez` says that this process answers; the others also that at least one model can be served end to end now.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_head.api.errors import SERVER, ApiError
from superfluid_head.api.state import Head

NO_SPANS = {"exported": 0, "failed": 0, "dropped": 0}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HealthEndpoint:
    """The operational routes' handlers."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def livez(self, request: Request) -> Response:
        """Answer while the process lives."""
        del request
        return JSONResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Answer 200 while some model can be served and the head does not shut down, else 503."""
        del request
        if self._head.inflight.is_draining:
            raise _unready("draining", "this head is shutting down")
        if not self._head.can_serve():
            raise _unready("no_worker", "no node can serve a model now")
        warnings = self._head.warnings
        return JSONResponse({"status": "ok", **({"warnings": list(warnings)} if warnings else {})})

    async def metrics(self, request: Request) -> Response:
        """Give the metrics in Prometheus' text format; a key that is no admin's sees its own rows."""
        principal = request.scope["state"]["principal"]
        if not principal.admin:
            return _text(self._head.metrics.render(principal.name))
        head, metrics = self._head, self._head.metrics
        metrics.nodes(head.fleet.health().nodes)
        metrics.waiting(head.fleet.waiting_by_class())
        for name, counts in head.fleet.counts().items():
            metrics.show(name, {(event,): count for event, count in counts.items()})
        metrics.show("ready", {(): float(head.can_serve())})
        metrics.show("workers", {(): 1.0})
        metrics.show(
            "worker_ends", {(cause,): count for cause, count in head.worker_ends().items()}
        )
        metrics.show("info", {(head.version,): 1.0})
        spans = NO_SPANS if head.tracer is None else head.tracer.counts()
        metrics.show("spans", {(outcome,): count for outcome, count in spans.items()})
        return _text(metrics.render())

    async def version(self, request: Request) -> Response:
        """Tell the version."""
        del request
        return JSONResponse({"version": self._head.version})


def _text(rows: bytes) -> Response:
    return Response(rows, headers={"content-type": METRICS_TYPE})


def _unready(code: str, words: str) -> ApiError:
    return ApiError(503, words, code=code, type=SERVER, headers={"Retry-After": "1"})
