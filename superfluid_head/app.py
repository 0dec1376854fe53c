"""Assembles the HTTP application: routes, error shapes, and the gate around all of it.

Knows every endpoint and no socket. The interactive documentation of the framework is off: routes that are not ours
do not exist.
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from superfluid_core.errors import SuperfluidError
from superfluid_head.access.addresses import Proxies
from superfluid_head.access.origins import Origins
from superfluid_head.api.anthropic.endpoint import MessagesEndpoint
from superfluid_head.api.body import ClientGoneError
from superfluid_head.api.chat import ChatEndpoint
from superfluid_head.api.completions import CompletionsEndpoint
from superfluid_head.api.direct import Direct, Handler, Key
from superfluid_head.api.embeddings import EmbeddingsEndpoint
from superfluid_head.api.errors import ApiError, from_error, internal, not_found, wrong_verb
from superfluid_head.api.fleet import FleetEndpoint
from superfluid_head.api.gate import Gate, GateRules
from superfluid_head.api.health import HealthEndpoint
from superfluid_head.api.idempotency import Idempotency
from superfluid_head.api.models import ModelsEndpoint
from superfluid_head.api.nodes import NodesEndpoint
from superfluid_head.api.ollama.catalog import CatalogEndpoint
from superfluid_head.api.ollama.embed import EmbedEndpoint
from superfluid_head.api.ollama.generate import OllamaEndpoint
from superfluid_head.api.prefixes import PrefixesEndpoint
from superfluid_head.api.responses.endpoint import ResponsesEndpoint
from superfluid_head.api.sessions import SessionsEndpoint
from superfluid_head.api.shapes import reply
from superfluid_head.api.slots import Slots
from superfluid_head.api.state import Head
from superfluid_head.api.tokens import TokensEndpoint
from superfluid_head.api.turns import Turns
from superfluid_head.dashboard.pages import DashboardEndpoint
from superfluid_head.workers.place import Place

EXPECTED = (ApiError, SuperfluidError, ClientGoneError, HTTPException)
READ = ("GET", "HEAD")


def routes(head: Head) -> list[tuple[tuple[str, ...], str, Handler]]:
    """Every route: verbs, path, handler."""
    chat, models, health = ChatEndpoint(head), ModelsEndpoint(head), HealthEndpoint(head)
    sessions = SessionsEndpoint(head.sessions, head.qos, head.limits)
    prefixes, nodes, fleet = PrefixesEndpoint(head), NodesEndpoint(head), FleetEndpoint(head)
    completions, tokens = CompletionsEndpoint(head), TokensEndpoint(head)
    ollama, catalog = OllamaEndpoint(head), CatalogEndpoint(head)
    embeddings = EmbeddingsEndpoint(head)
    embed = EmbedEndpoint(head, embeddings)
    messages, responses = MessagesEndpoint(head), ResponsesEndpoint(head)
    dashboard = DashboardEndpoint()
    return [
        (("POST",), "/v1/chat/completions", chat.post),
        (("POST",), "/v1/completions", completions.post),
        (("POST",), "/v1/embeddings", embeddings.post),
        (("POST",), "/v1/messages", messages.post),
        (("POST",), "/v1/messages/count_tokens", messages.count),
        (("POST",), "/v1/responses", responses.post),
        (("GET", "HEAD", "DELETE"), "/v1/responses/{response}", responses.stored),
        (("POST",), "/v1/responses/{response}/cancel", responses.stored),
        (READ, "/v1/responses/{response}/input_items", responses.stored),
        (("POST",), "/api/chat", ollama.chat),
        (("POST",), "/api/generate", ollama.generate),
        (("POST",), "/api/embed", embed.post),
        (("POST",), "/api/embeddings", embed.post_old),
        (("POST",), "/api/show", catalog.show),
        (READ, "/api/tags", catalog.tags),
        (READ, "/api/ps", catalog.running),
        (READ, "/api/version", catalog.version),
        (("POST",), "/tokenize", tokens.tokenize),
        (("POST",), "/detokenize", tokens.detokenize),
        (READ, "/v1/sessions", sessions.every),
        (READ, "/v1/sessions/{session}", sessions.one),
        (("POST",), "/v1/sessions/{session}/qos", sessions.set_class),
        (("DELETE",), "/v1/sessions/{session}", sessions.cancel),
        (("POST",), "/v1/prefixes", prefixes.post),
        (("DELETE",), "/v1/prefixes/{prefix}", prefixes.delete),
        (READ, "/v1/fleet", fleet.state),
        (("GET",), "/v1/fleet/events", fleet.events),
        (READ, "/v1/fleet/requests/{request:path}", fleet.why),
        (("POST",), "/v1/fleet/nodes/{node:path}/drain", fleet.drain),
        (("POST",), "/v1/fleet/nodes/{node:path}/undrain", fleet.undrain),
        (READ, "/v1/fleet/nodes/{node}/stats", nodes.stats),
        (READ, "/scheduler/stats", nodes.every),
        (READ, "/v1/models", models.every),
        (READ, "/v1/models/{name:path}", models.one),
        (READ, "/livez", health.livez),
        (READ, "/readyz", health.readyz),
        (READ, "/health", health.readyz),
        (READ, "/ping", health.readyz),
        (READ, "/metrics", health.metrics),
        (READ, "/version", health.version),
        (READ, "/", dashboard.index),
        (READ, "/dashboard", dashboard.index),
        (READ, "/dashboard/{file}", dashboard.file),
    ]


class _PlainRoute(APIRoute):
    """A route whose handler takes the request as it is and answers it: nothing is to be resolved or converted around it."""

    def get_route_handler(self) -> Handler:  # type: ignore[override]  # as a coroutine function is
        handler: Handler = self.endpoint
        return handler


def build_app(
    head: Head, loopback_ports: frozenset[int] = frozenset(), worker: Place | None = None
) -> ASGIApp:
    """Build the application of one head, or of one worker. `loopback_ports` are those of listeners bound to loopback addresses."""
    app = FastAPI(
        openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, title="superfluid"
    )
    app.router.route_class = _PlainRoute
    known: dict[Key, tuple[Handler, BaseRoute]] = {}
    for verbs, path, handler in routes(head):
        app.add_api_route(path, handler, methods=list(verbs), response_model=None)
        if "{" not in path:
            known |= {(verb, path): (handler, app.routes[-1]) for verb in verbs}
    for kind in (*EXPECTED, Exception):
        app.add_exception_handler(kind, _on_error)
    access = head.access
    rules = GateRules(
        head.keys,
        head.quotas,
        loopback_ports,
        access.rate_limit_rpm,
        Proxies(access.proxies),
        Origins(access.origins),
        "" if worker is None else str(worker.door(worker.number)),
    )
    inner = Idempotency(
        Slots(Turns(Direct(app, known, EXPECTED, _on_error)), head.quotas), head.clock, head.limits
    )
    answers = inner if worker is None else _for_all(inner, worker, head)
    return Gate(answers, rules, head.metrics, head.clock, head.tracer)


def _for_all(inner: ASGIApp, worker: Place, head: Head) -> ASGIApp:
    """Make a worker answer for all; what that takes, an HTTP client among it, a head alone never loads."""
    from superfluid_head.workers.siblings import Siblings

    return Siblings(inner, worker, head.limits)


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            return reply(error, request.scope)
        case SuperfluidError():
            return reply(from_error(error), request.scope)
        case ClientGoneError():
            return Response(status_code=499)
        case HTTPException(status_code=404):
            return reply(not_found(), request.scope)
        case HTTPException(status_code=405):
            return _on_wrong_verb(request, error)
        case HTTPException():
            return reply(ApiError(error.status_code, "the request was refused"), request.scope)
        case _:
            return reply(internal(), request.scope)


def _on_wrong_verb(request: Request, error: HTTPException) -> Response:
    headers = dict(error.headers or {})
    if request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    return reply(wrong_verb(headers), request.scope)
