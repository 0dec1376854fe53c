"""GET /api/tags, /api/ps and /api/version, POST /api/show: the models of the head as Ollama's clients list them.

A name may carry the tag `:latest`, which those clients add by themselves; any other tag is part of the name. Only what a head knows is
told: files, sizes and quantizations are the nodes'.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_head.api.body import read_as
from superfluid_head.api.errors import invalid
from superfluid_head.api.ollama.schemas import ShowBody
from superfluid_head.api.ollama.times import time_text
from superfluid_head.api.schemas.common import reads
from superfluid_head.api.state import Head, Target
from superfluid_head.text.chat import ModelText
from superfluid_head.text.fim import find_fim

LATEST = ":latest"
CONFIG = "config.json"


def served_name(head: Head, name: str | None) -> str | None:
    """Return the name as the head serves it."""
    if name is not None and name.endswith(LATEST) and name not in head.models():
        return name.removesuffix(LATEST)
    return name


class CatalogEndpoint:
    """The routes' handlers."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def tags(self, request: Request) -> Response:
        """List the models, as Ollama does."""
        del request
        cards = [self._card(model) for model in self._head.models().values()]
        return JSONResponse({"models": cards})

    async def running(self, request: Request) -> Response:
        """List what nodes serve now; nothing expires."""
        del request
        cards = [
            {**self._card(model), "context_length": model.window}
            for model in self._head.models().values()
            if model.is_up
        ]
        return JSONResponse({"models": cards})

    async def version(self, request: Request) -> Response:
        """Tell the version, as Ollama does."""
        del request
        return JSONResponse({"version": self._head.version})

    async def show(self, request: Request) -> Response:
        """Describe one model, as Ollama does."""
        body = await read_as(request, self._head.limits, reads(ShowBody))
        name = body.model if body.name is None else body.name
        if name is None:
            raise invalid("model is missing", param="model")
        target, text = self._head.target(served_name(self._head, name))
        family = _family(text)
        info = {
            "general.architecture": family,
            "general.basename": target.name,
            f"{family}.context_length": target.window,
            f"{family}.vocab_size": text.tokenizer.vocabulary,
        }
        answer = {
            "modelfile": "",
            "parameters": "",
            "template": "" if text.template is None else text.template.source,
            "details": _details(text),
            "model_info": info,
            "capabilities": _capabilities(text),
            "modified_at": time_text(self._head.created_s),
        }
        return JSONResponse(answer)

    def _card(self, model: Target) -> dict[str, Any]:
        card: dict[str, Any] = {
            "name": model.name,
            "model": model.name,
            "modified_at": time_text(self._head.created_s),
        }
        if model.text is not None:
            card |= {"digest": model.text.fingerprint, "details": _details(model.text)}
        return card


def _details(text: ModelText) -> dict[str, Any]:
    family = _family(text)
    return {"parent_model": "", "family": family, "families": [family]}


def _family(text: ModelText) -> str:
    """Name the architecture as the model's own configuration does."""
    try:
        kind = json.loads(text.files[CONFIG]).get("model_type")
    except (KeyError, ValueError):
        return "unknown"
    return kind if isinstance(kind, str) else "unknown"


def _capabilities(text: ModelText) -> list[str]:
    found = {
        "completion": True,
        "tools": text.dialect.calls is not None,
        "thinking": text.dialect.reasoning is not None,
        "insert": find_fim(text.tokenizer) is not None,
    }
    return [name for name, has in found.items() if has]
