"""Embedding a text somewhere in the fleet: which node is asked, and who is asked next when one cannot.

Nothing is reserved and nothing moves: a text is one question and one answer, asked again elsewhere when its node was lost, drains or is
too busy. It is sent in one frame, which bounds its length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from superfluid_core.errors import CapacityError, ErrorCode, GenerationError, InvalidRequestError
from superfluid_core.limits import KIB, WireLimits
from superfluid_head.fleet.node import FleetNode

TRIES_MAX = 3
RETRY_MS = 2_000
ID_BYTES = 4
HEAD_ROOM_BYTES = 4 * KIB

EMBED_TOKENS_MAX = (WireLimits().frame_bytes_max - HEAD_ROOM_BYTES) // ID_BYTES
"""Tokens of a text that fit the frame which it is sent in."""


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """A text as ids, and what is to become of it."""

    model: str
    pooling: str
    ids: tuple[int, ...]


async def embed(nodes: Iterable[FleetNode], wanted: EmbedRequest) -> bytes:
    """Return the vector, little-endian float32. Raises SuperfluidError."""
    if len(wanted.ids) > EMBED_TOKENS_MAX:
        words = (
            f"the input takes {len(wanted.ids)} tokens; at most {EMBED_TOKENS_MAX} can be embedded"
        )
        code = ErrorCode.CONTEXT_LENGTH_EXCEEDED
        raise InvalidRequestError(words, param="input", code=code)
    failure: GenerationError | CapacityError | None = None
    for node in _ranked(nodes, wanted)[:TRIES_MAX]:
        try:
            return await node.asks.embed(node, wanted.model, wanted.pooling, wanted.ids)
        except (GenerationError, CapacityError) as error:
            failure = error
    if failure is not None:
        raise failure
    words = "no node that serves this model is up"
    raise CapacityError(words, code=ErrorCode.NO_WORKER, retry_after_ms=RETRY_MS)


def _ranked(nodes: Iterable[FleetNode], wanted: EmbedRequest) -> list[FleetNode]:
    """Order the nodes that can take it, the idlest first."""
    able = []
    for node in nodes:
        view = node.view
        offer = view.offers.get(wanted.model)
        if offer is None or not view.is_up or view.is_draining or len(wanted.ids) > offer.window:
            continue
        work = view.work(offer)
        able.append((view.is_suspect, node.asks.embeds, work.in_progress, node.key, node))
    return [entry[-1] for entry in sorted(able, key=lambda entry: entry[:-1])]
