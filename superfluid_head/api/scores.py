"""Log-probabilities of prompts, for an echo with `logprobs`: each prompt is scored by itself on some node, once for all of its choices.

A score is no session: it takes no lane and nothing of a prefix cache, and is asked for elsewhere when its node is lost, as a vector is.
How many are asked for at once is bounded, for one request and for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from superfluid_core.engine.scores import scoring, unpack_scores
from superfluid_core.errors import InvalidRequestError
from superfluid_core.session import TokenLogprobs
from superfluid_head.api.ports import FleetDoor
from superfluid_head.api.together import together
from superfluid_head.fleet.embeds import EMBED_TOKENS_MAX, EmbedRequest
from superfluid_head.text.chat import too_long

AT_ONCE = 16
AT_ONCE_PER_REQUEST = 4
SCORED_MIN = 2


class PromptScores:
    """Asks the fleet for scores."""

    def __init__(self, fleet: FleetDoor) -> None:
        self._fleet = fleet
        self._room = asyncio.Semaphore(AT_ONCE)

    async def of(
        self, model: str, prompts: Sequence[tuple[int, ...]], best: int
    ) -> list[list[TokenLogprobs]]:
        """Score every prompt, from its second token on. Raises SuperfluidError."""
        for ids in prompts:
            if len(ids) > EMBED_TOKENS_MAX:
                raise too_long(EMBED_TOKENS_MAX, len(ids), None, "prompt")
        mine = asyncio.Semaphore(AT_ONCE_PER_REQUEST)

        async def one(ids: tuple[int, ...]) -> list[TokenLogprobs]:
            if len(ids) < SCORED_MIN:
                return []
            async with mine, self._room:
                data = await self._fleet.embed(EmbedRequest(model, scoring(best), ids))
            return await asyncio.to_thread(unpack_scores, data, len(ids))

        try:
            return await together(one(ids) for ids in prompts)
        except InvalidRequestError as error:  # told of this route's member
            raise InvalidRequestError(error.message, param="prompt", code=error.code) from None
