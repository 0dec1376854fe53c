"""POST /v1/prefixes: makes a prefix warm on a node and keeps it there; DELETE lets it go. For admins.

The prompt is run once with a single token of output, which puts its blocks into a node's cache (at no cost if they are there),
and that node is asked to evict them last for `ttl_s`. Prefixes belong to tenants: an admin may name whose it is.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_core.clock import SECOND
from superfluid_core.errors import CapacityError, ErrorCode, GenerationError
from superfluid_core.session import SamplingParams
from superfluid_head.access.keys import Principal
from superfluid_head.api.body import read_as
from superfluid_head.api.conversation import message_dict
from superfluid_head.api.errors import ApiError, invalid, require_admin
from superfluid_head.api.legacy import modern_messages
from superfluid_head.api.schemas.chat import LIMITS, ChatMessage
from superfluid_head.api.schemas.common import BodyModel, Int, TokenIds, reads
from superfluid_head.api.sse import while_connected
from superfluid_head.api.state import Head, Target
from superfluid_head.fleet.events import EndEvent, GenerationRequest
from superfluid_head.fleet.pins import PinnedPrefix, PrefixPin
from superfluid_head.text.chat import Conversation, ModelText, too_long

TTL_S = 3_600
TTL_S_MAX = 7 * 86_400
PREFIXES_MAX = 1_024


class PrefixRequest(BodyModel):
    """The body: exactly one of `messages` and `prompt`."""

    accepted: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None
    messages: (
        Annotated[
            list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=LIMITS.messages_max)
        ]
        | None
    ) = None
    prompt: str | Annotated[TokenIds, Field(min_length=1)] | None = None
    ttl_s: Annotated[Int, Field(ge=1, le=TTL_S_MAX)] = TTL_S
    tenant: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> PrefixRequest:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("exactly one of messages and prompt is needed")
        return self


@dataclass(frozen=True, slots=True)
class _Kept:
    pinned: PinnedPrefix
    until_ns: int


@dataclass(slots=True)
class PrefixesEndpoint:
    """The routes' handlers, and the prefixes that this head keeps."""

    head: Head
    _kept: dict[str, _Kept] = field(default_factory=dict)

    async def post(self, request: Request) -> Response:
        """Compute the beginning of prompts ahead and keep it in a cache for a while (admins)."""
        principal: Principal = request.scope["state"]["principal"]
        require_admin(principal)
        body = await read_as(request, self.head.limits, reads(PrefixRequest))
        self.head.inflight.judge()
        self._forget_ended()
        if len(self._kept) >= PREFIXES_MAX:
            raise CapacityError(
                f"{PREFIXES_MAX} prefixes are kept already", code=ErrorCode.OVERLOADED
            )
        request_id = request.scope["state"]["request_id"]
        made = self._make(body, body.tenant or principal.name, request_id)
        return JSONResponse(await while_connected(request, made))

    async def delete(self, request: Request) -> Response:
        """Keep a prefix no longer (admins)."""
        require_admin(request.scope["state"]["principal"])
        self._forget_ended()
        name = request.path_params["prefix"]
        kept = self._kept.pop(name, None)
        if kept is None:
            raise ApiError(404, "no such prefix is kept", code="prefix_not_found")
        self.head.fleet.unpin_prefix(kept.pinned)
        return JSONResponse({"id": name, "object": "prefix", "deleted": True})

    async def _make(self, body: PrefixRequest, tenant: str, request_id: str) -> dict[str, Any]:
        target, text = self.head.target(body.model)
        prompt = await _encode(body, text, target)
        salt = self.head.prefix_salt(tenant, body.cache_salt)
        warm = GenerationRequest(
            request_id=request_id,
            model=target.name,
            prompt=prompt,
            sampling=SamplingParams(temperature=0.0),
            max_output=1,
            qos=self.head.qos.rules.default,
            tenant=tenant,
            cache_salt=salt,
        )
        async with self.head.inflight.hold():
            node, cached = await self._warm(warm)
            pin = PrefixPin(node, target.name, prompt, tenant, salt, 1_000 * body.ttl_s)
            pinned = await self.head.fleet.pin_prefix(pin)
        name = "prefix-" + secrets.token_hex(12)
        self._kept[name] = _Kept(pinned, self.head.clock.now_ns() + body.ttl_s * SECOND)
        return {
            "id": name,
            "object": "prefix",
            "model": target.name,
            "tenant": tenant,
            "node": pinned.node,
            "prompt_tokens": len(prompt),
            "pinned_tokens": pinned.tokens,
            "warm_tokens": cached,
            "ttl_s": body.ttl_s,
            "expires_at": self.head.clock.wall_s() + body.ttl_s,
        }

    async def _warm(self, request: GenerationRequest) -> tuple[str, int]:
        """Run the prompt; returns the node that has it now, and what it had before."""
        async with self.head.fleet.generate(request) as generation:
            async for event in generation:
                if isinstance(event, EndEvent) and generation.last_node is not None:
                    return generation.last_node, event.cached
        raise GenerationError("the prefix could not be computed", code=ErrorCode.NODE_LOST)

    def _forget_ended(self) -> None:
        now_ns = self.head.clock.now_ns()
        for name in [name for name, kept in self._kept.items() if kept.until_ns <= now_ns]:
            del self._kept[name]


async def _encode(body: PrefixRequest, text: ModelText, target: Target) -> tuple[int, ...]:
    """Return the ids of the prefix, with room for the one token that computes it."""
    prompt = body.prompt
    if body.messages is not None:
        messages = [message_dict(message) for message in modern_messages(body.messages)]
        conversation = Conversation(messages, add_generation_prompt=False)
        ids = await text.encode(conversation, target.window)
    elif isinstance(prompt, str):
        ids = await _encode_text(prompt, text)
    else:
        ids = tuple(prompt or ())
        if any(token >= text.tokenizer.vocabulary for token in ids):
            raise invalid(f"a token id is not below {text.tokenizer.vocabulary}", param="prompt")
    if not ids:
        raise invalid("the prefix is empty", param="prompt")
    if len(ids) >= target.window:
        raise too_long(target.window, len(ids), 1)
    return ids


async def _encode_text(prompt: str, text: ModelText) -> tuple[int, ...]:
    if len(prompt.encode()) > LIMITS.tokenize_inline_bytes_max:
        raise invalid("a text this long has to come as token ids", param="prompt")

    def encode() -> tuple[int, ...]:
        return tuple(text.tokenizer.encode(prompt, allow_special=False, add_bos=True))

    return await asyncio.to_thread(encode)
