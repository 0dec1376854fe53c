"""POST /v1/embeddings: texts to vectors, each computed by itself on some node, told in the order in which they came.

Owns what a request is refused for and the shape of the reply. A model of this fleet generates; it embeds when a request or the operator
says how its states are to be pooled, and is refused otherwise. How many texts are asked for at once is bounded, for one request and for all.
"""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from superfluid_core.errors import InvalidRequestError
from superfluid_head.api.body import read_as
from superfluid_head.api.errors import invalid
from superfluid_head.api.run import judge_caller
from superfluid_head.api.schemas.common import read_model
from superfluid_head.api.schemas.embeddings import EmbeddingsRequest, inputs_of
from superfluid_head.api.schemas.texts import Ids, are_known
from superfluid_head.api.sse import while_connected
from superfluid_head.api.state import Head, Target
from superfluid_head.api.together import together
from superfluid_head.fleet.embeds import EMBED_TOKENS_MAX, EmbedRequest
from superfluid_head.text.chat import ModelText, too_long

AT_ONCE = 16
AT_ONCE_PER_REQUEST = 4
CONFIG = "config.json"


class EmbeddingsEndpoint:
    """The route's handler, and the way that Ollama's take."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._room = asyncio.Semaphore(AT_ONCE)

    async def post(self, request: Request) -> Response:
        """Turn texts or lists of ids into vectors (OpenAI embeddings); other models than embedding models need `pooling`."""
        body, inputs = await read_as(request, self._head.limits, _read)
        name, vectors, count = await self.embed(request, body, inputs)
        usage = {"prompt_tokens": count, "total_tokens": count}
        frame = {"object": "list", "model": name, "usage": usage}
        is_coded = body.encoding_format == "base64"

        def shown(index: int, vector: bytes) -> dict[str, Any]:
            value = base64.b64encode(vector).decode() if is_coded else floats_of(vector)
            return {"object": "embedding", "index": index, "embedding": value}

        return await asyncio.to_thread(vectors_reply, frame, "data", vectors, shown)

    async def embed(
        self, request: Request, body: EmbeddingsRequest, inputs: Sequence[str | Ids]
    ) -> tuple[str, list[bytes], int]:
        """Return the model's name, the vectors and the tokens that were read. Raises ApiError or SuperfluidError."""
        head = self._head
        target, text = head.target(body.model)
        pooling = _pooling(body, head.embedding_pooling)
        _judge_dimensions(body, text)
        head.inflight.judge()
        principal = judge_caller(head, request).principal
        coded = await while_connected(request, _encode(body, inputs, target, text))
        wanted = [EmbedRequest(target.name, pooling, ids) for ids in coded]
        mine = asyncio.Semaphore(AT_ONCE_PER_REQUEST)
        async with head.inflight.hold():
            work = together(self._one(each, mine) for each in wanted)
            vectors = await while_connected(request, work)
        count = sum(len(ids) for ids in coded)
        head.quotas.charge(principal, count, head.clock.now_ns())
        whose = (target.name, principal.name)
        head.metrics.tokens(whose, prompt=count, cached=0, completion=0)
        return target.name, vectors, count

    async def _one(self, wanted: EmbedRequest, mine: asyncio.Semaphore) -> bytes:
        async with mine, self._room:
            return await self._head.fleet.embed(wanted)


def _pooling(body: EmbeddingsRequest, default: str) -> str:
    """Say how states are pooled. Raises ApiError 400 for a model that only generates."""
    if body.pooling is not None:
        return body.pooling
    if default == "none":
        raise invalid(
            "this model generates text; say how its states are to be pooled (pooling: mean or last; the server may set "
            "--embedding-pooling)",
            param="model",
            code="unsupported_value",
        )
    return default


def _judge_dimensions(body: EmbeddingsRequest, text: ModelText) -> None:
    """No model here is known to keep its meaning when its vectors are cut. Raises ApiError 400."""
    if body.dimensions is None:
        return
    size = hidden_size(text)
    if body.dimensions != size:
        has = "" if size is None else f"; its vectors have {size}"
        words = f"this model cannot make vectors of {body.dimensions} dimensions{has}"
        raise invalid(words, param="dimensions", code="unsupported_value")


def hidden_size(text: ModelText) -> int | None:
    """Return how long the model's vectors are, if its configuration says so."""
    try:
        size = json.loads(text.files[CONFIG]).get("hidden_size")
    except (KeyError, ValueError):
        return None
    return size if isinstance(size, int) else None


async def _encode(
    body: EmbeddingsRequest, inputs: Sequence[str | Ids], target: Target, text: ModelText
) -> list[Ids]:
    """Make the ids of every text; control tokens that one spells are text. Raises ApiError or InvalidRequestError."""
    texts = [given for given in inputs if isinstance(given, str)]
    try:
        coded = iter(await text.encode_texts(texts, target.window, is_raw=False, add_bos=True))
    except InvalidRequestError as error:
        words = error.message.replace("prompt takes", "longest input takes")
        raise InvalidRequestError(words, param="input", code=error.code) from None
    made: list[Ids] = []
    for at, given in enumerate(inputs):
        ids = next(coded) if isinstance(given, str) else given
        if not are_known(ids, text.tokenizer.vocabulary):
            words = f"input[{at}]: a token id is not in 0..{text.tokenizer.vocabulary - 1}"
            raise invalid(words, param=f"input[{at}]")
        if body.truncate_prompt_tokens is not None:
            ids = ids[-body.truncate_prompt_tokens :]
        if len(ids) > min(target.window, EMBED_TOKENS_MAX):
            most = min(target.window, EMBED_TOKENS_MAX)
            raise too_long(most, len(ids), None, f"input[{at}]")
        made.append(ids)
    return made


def _read(members: dict[str, Any]) -> tuple[EmbeddingsRequest, list[str | Ids]]:
    body = read_model(EmbeddingsRequest, members)
    return body, inputs_of(body.input)


def vectors_reply(
    frame: dict[str, Any],
    name: str,
    vectors: Sequence[bytes],
    shown: Callable[[int, bytes], Any],
) -> Response:
    """Make a reply of `frame` and the list `name` of all vectors as they are `shown`; for a thread: each is a step of its own."""
    parts = [json.dumps(shown(index, vector)) for index, vector in enumerate(vectors)]
    head = json.dumps(frame, ensure_ascii=False)[:-1]
    content = f'{head}, "{name}": [{", ".join(parts)}]}}'.encode()
    return Response(content, media_type="application/json")


def floats_of(vector: bytes) -> list[float]:
    """Read a vector's values."""
    values = array("f")
    values.frombytes(vector)
    return values.tolist()
