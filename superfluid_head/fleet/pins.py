"""Pinned prefixes: which blocks of which node, named as the node names them; asked for, and checked, over its link.

A head that knows a node's salt can name the blocks of any prompt. PIN has no answer of its own: links keep order, so the
node's figures asked for right after it say whether the budget held. One pin at a time, so that the figures are ours.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from superfluid_core.blockhash import block_chain, root_hash
from superfluid_core.errors import CapacityError, ErrorCode, GenerationError, InvalidRequestError
from superfluid_core.wire.messages import Message, ModelOffer, Pin, Unpin
from superfluid_head.fleet.asks import Asks

HASHES_PER_FRAME = 2_048
FEATURE = "pins"
SHARED = "prefix-shared"
RETRY_MS = 120_000


@dataclass(frozen=True, slots=True)
class PrefixPin:
    """What is to be kept: the front of `prompt` as `tenant` sent it, on `node`, for `ttl_ms`."""

    node: str
    model: str
    prompt: tuple[int, ...]
    tenant: str
    cache_salt: bytes
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """What is kept, and where."""

    node: str
    model: str
    names: tuple[bytes, ...]
    tokens: int


class Holder(Protocol):
    """A linked node that can pin."""

    @property
    def title(self) -> str: ...

    @property
    def asks(self) -> Asks: ...

    def send(self, message: Message) -> bool: ...


@dataclass(frozen=True, slots=True)
class Naming:
    """How a node names blocks: its salt, whether tenants share, and the size of a block."""

    salt: bytes
    is_shared: bool
    block_tokens: int

    @staticmethod
    def of(offer: ModelOffer, features: Sequence[str], salt: bytes) -> Naming:
        if FEATURE not in features:
            raise InvalidRequestError("this node has no pins", code=ErrorCode.UNSUPPORTED)
        return Naming(salt, SHARED in features, offer.block_tokens)

    def names(self, pin: PrefixPin) -> tuple[bytes, ...]:
        """Name the full blocks of the prompt."""
        tenant = "" if self.is_shared else pin.tenant
        root = root_hash(self.salt, tenant=tenant, cache_salt=pin.cache_salt)
        return tuple(block_chain(root, pin.prompt, self.block_tokens))


class Pinner:
    """Pins on behalf of one head, one prefix after another."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def pin(self, holder: Holder, naming: Naming, pin: PrefixPin) -> PinnedPrefix:
        """Keep all of a prefix, or nothing. Raises InvalidRequestError, CapacityError or GenerationError."""
        names = await asyncio.to_thread(naming.names, pin)
        if not names:
            text = f"the prefix is shorter than a block of {naming.block_tokens} tokens"
            raise InvalidRequestError(text, param="prompt")
        async with self._turn:
            before = await _figures(holder, pin.model)
            if len(names) > before["budget_blocks"]:
                raise InvalidRequestError(
                    f"the prefix takes {len(names)} blocks; pins may take "
                    f"{before['budget_blocks']} on this node",
                    code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                )
            for start in range(0, len(names), HASHES_PER_FRAME):
                some = names[start : start + HASHES_PER_FRAME]
                _send(holder, Pin(some, pin.ttl_ms, pin.model))
            after = await _figures(holder, pin.model)
        refused = after["refused_blocks"] - before["refused_blocks"]
        tokens = len(names) * naming.block_tokens
        pinned = PinnedPrefix(holder.title, pin.model, names, tokens)
        if refused > 0:
            unpin(holder, pinned)
            raise CapacityError(
                f"{refused} of {len(names)} blocks could not be pinned: the node's budget is used up, "
                "or its cache has lost them",
                code=ErrorCode.OVERLOADED,
                retry_after_ms=1_000 * after["seconds_to_next_end"] or RETRY_MS,
            )
        return pinned


def unpin(holder: Holder, pinned: PinnedPrefix) -> None:
    """Let go; a link that is down needs no word, the node forgets by itself."""
    for start in range(0, len(pinned.names), HASHES_PER_FRAME):
        holder.send(Unpin(pinned.names[start : start + HASHES_PER_FRAME], pinned.model))


def _send(holder: Holder, message: Message) -> None:
    if not holder.send(message):
        raise GenerationError("the node is not linked", code=ErrorCode.NODE_LOST)


async def _figures(holder: Holder, model: str) -> dict[str, int]:
    """Ask for the figures of the model's pins: each model of a node has a budget of its own."""
    try:
        pins: Any = json.loads(await holder.asks.stats(holder))["pins"][model]
        return {
            name: int(pins[name])
            for name in ("budget_blocks", "refused_blocks", "seconds_to_next_end")
        }
    except (ValueError, KeyError, TypeError):
        raise GenerationError(
            "the node's figures make no sense", code=ErrorCode.PROTOCOL_ERROR
        ) from None
