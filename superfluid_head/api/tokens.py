"""POST /tokenize and /detokenize: what a text is to the model and back, in vLLM's dialect and in llama.cpp's.

Tokenizing takes the same way as a generation does (threads and the text process), so counts are those that usage will tell. Control
tokens are parsed in a raw prompt, as /v1/completions does, and never in messages. Reading back gives every id's text, control
tokens included; the one blank that some vocabularies put before a text is taken away again.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_head.api.body import read_as
from superfluid_head.api.conversation import message_dict, shown_tools
from superfluid_head.api.errors import invalid
from superfluid_head.api.legacy import modern_messages
from superfluid_head.api.schemas.common import reads
from superfluid_head.api.schemas.texts import are_known
from superfluid_head.api.schemas.tokens import DetokenizeRequest, TokenizeRequest
from superfluid_head.api.sse import while_connected
from superfluid_head.api.state import Head
from superfluid_head.text.chat import Conversation, ModelText

COUNTED_MAX = 1 << 17
"""Tokens that are counted even for a model of a smaller window."""


class TokensEndpoint:
    """The routes' handlers."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def tokenize(self, request: Request) -> Response:
        """Turn a text, a prompt or a conversation into ids."""
        body = await read_as(request, self._head.limits, reads(TokenizeRequest))
        given = [
            name for name in ("prompt", "messages", "content") if getattr(body, name) is not None
        ]
        if len(given) != 1:
            raise invalid("exactly one of prompt, messages and content is needed", param="prompt")
        target, text = self._head.target(body.model)
        window = max(target.window, COUNTED_MAX)
        ids = await while_connected(request, _encode(body, text, window))
        return await asyncio.to_thread(_told, body, ids, text, target.window)

    async def detokenize(self, request: Request) -> Response:
        """Turn ids into text."""
        body = await read_as(request, self._head.limits, reads(DetokenizeRequest))
        _, text = self._head.target(body.model)
        vocabulary = text.tokenizer.vocabulary
        if not are_known(body.tokens, vocabulary):
            raise invalid(f"a token id is not below {vocabulary}", param="tokens")
        found = await asyncio.to_thread(_read, body.tokens, text)
        return JSONResponse({"prompt": found, "content": found})


def _told(body: TokenizeRequest, ids: tuple[int, ...], text: ModelText, window: int) -> Response:
    """Make the reply; in a thread, for there may be many ids."""
    if body.content is not None:
        return JSONResponse({"tokens": _pieces(ids, text) if body.with_pieces else list(ids)})
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": window, "tokens": list(ids)}
    if body.return_token_strs:
        answer["token_strs"] = [
            text.tokenizer.token_bytes(token).decode("utf-8", "backslashreplace") for token in ids
        ]
    return JSONResponse(answer)


async def _encode(body: TokenizeRequest, text: ModelText, window: int) -> tuple[int, ...]:
    if body.messages is not None:
        ids = await text.encode(_conversation(body), window)
        bos = text.tokenizer.bos_id
        if body.add_special_tokens and bos is not None and ids[:1] != (bos,):
            return (bos, *ids)
        return ids
    if body.content is not None:
        raw, has_bos, is_raw = body.content, body.add_special, body.parse_special
    else:
        raw, has_bos, is_raw = body.prompt or "", body.add_special_tokens is not False, True
    (found,) = await text.encode_texts((raw,), window, is_raw=is_raw, add_bos=has_bos)
    return found


def _conversation(body: TokenizeRequest) -> Conversation:
    wanted = body.add_generation_prompt
    return Conversation(
        messages=[message_dict(message) for message in modern_messages(body.messages or [])],
        tools=shown_tools(body.tools or ()),
        add_generation_prompt=not body.continue_final_message if wanted is None else wanted,
        continue_final_message=body.continue_final_message,
        kwargs=dict(body.chat_template_kwargs or {}),
    )


def _pieces(ids: tuple[int, ...], text: ModelText) -> list[dict[str, Any]]:
    """Give ids with their texts; one that is no whole text, as its bytes."""
    pieces: list[dict[str, Any]] = []
    for token in ids:
        data = text.tokenizer.token_bytes(token)
        try:
            pieces.append({"id": token, "piece": data.decode()})
        except UnicodeDecodeError:
            pieces.append({"id": token, "piece": list(data)})
    return pieces


def _read(ids: list[int], text: ModelText) -> str:
    tokenizer = text.tokenizer
    has_bos = ids[:1] == [tokenizer.bos_id]
    head = tokenizer.token_bytes(ids[0]) if has_bos else b""
    rest = b"".join(tokenizer.token_bytes(token) for token in (ids[1:] if has_bos else ids))
    if tokenizer.puts_leading_space and rest.startswith(b" "):
        rest = rest[1:]
    return (head + rest).decode("utf-8", "replace")
