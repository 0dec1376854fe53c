"""GET /v1/models and /v1/models/{id}: the union of what is configured and what the fleet serves or served, as far as the key goes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_head.api.state import Head, Target


class ModelsEndpoint:
    """The two routes' handlers. Ids may hold slashes, raw or encoded."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def every(self, request: Request) -> Response:
        """List the models that the fleet serves, also those whose nodes are all gone just now."""
        del request
        data = [self._card(model) for model in self._head.models().values()]
        return JSONResponse({"object": "list", "data": data})

    async def one(self, request: Request) -> Response:
        """Show one model."""
        return JSONResponse(self._card(self._head.model(request.path_params["name"])))

    def _card(self, model: Target) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._head.created_s,
            "owned_by": "superfluid",
            "max_model_len": model.window,
            "root": model.name,
            "parent": None,
        }
