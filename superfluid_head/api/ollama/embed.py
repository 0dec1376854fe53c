"""POST /api/embed and the older /api/embeddings: vectors in Ollama's shape, made on the way of /v1/embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_head.api.body import read_as
from superfluid_head.api.embeddings import EmbeddingsEndpoint, floats_of, vectors_reply
from superfluid_head.api.ollama.catalog import served_name
from superfluid_head.api.ollama.options import judge_window, members_of
from superfluid_head.api.ollama.schemas import ACCEPTED
from superfluid_head.api.schemas.common import BodyModel, Harmless, Int, read_model, reads
from superfluid_head.api.schemas.embeddings import EmbeddingsRequest, inputs_of
from superfluid_head.api.schemas.vendor import TEMPLATE_REFUSED
from superfluid_head.api.state import Head


class EmbedBody(BodyModel):
    """Both routes' body: `input` is the newer one's, `prompt` the older one's."""

    refused: ClassVar[Mapping[str, Harmless]] = TEMPLATE_REFUSED
    accepted: ClassVar[frozenset[str]] = ACCEPTED

    model: str | None = None
    input: Any = None
    prompt: str | None = None
    dimensions: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    pooling: Literal["mean", "last"] | None = None


class EmbedEndpoint:
    """The routes' handlers."""

    def __init__(self, head: Head, embeddings: EmbeddingsEndpoint) -> None:
        self._head = head
        self._embeddings = embeddings

    async def post(self, request: Request) -> Response:
        """Answer with a list of vectors, whatever the input was."""
        head = self._head
        began_ns = head.clock.now_ns()
        body = await read_as(request, head.limits, reads(EmbedBody))
        name, vectors, count = await self._embed(request, body, body.input)
        answer = {
            "model": name,
            "total_duration": head.clock.now_ns() - began_ns,
            "load_duration": 0,
            "prompt_eval_count": count,
        }
        return await asyncio.to_thread(
            vectors_reply, answer, "embeddings", vectors, lambda _, vector: floats_of(vector)
        )

    async def post_old(self, request: Request) -> Response:
        """Answer with one vector."""
        body = await read_as(request, self._head.limits, reads(EmbedBody))
        _, vectors, _ = await self._embed(request, body, body.prompt)
        return JSONResponse({"embedding": floats_of(vectors[0])})

    async def _embed(
        self, request: Request, body: EmbedBody, given: Any
    ) -> tuple[str, list[bytes], int]:
        members_of(body.options)
        target, _ = self._head.target(served_name(self._head, body.model))
        judge_window(body.options, target.window)
        members = {
            "model": target.name,
            "input": given,
            "dimensions": body.dimensions,
            "pooling": body.pooling,
        }
        asked = read_model(EmbeddingsRequest, members)
        return await self._embeddings.embed(request, asked, inputs_of(asked.input))
