"""Embedding over the fleet: which node is asked, who is asked next, and what a node's refusals mean to the caller."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from superfluid_core.errors import CapacityError, ErrorCode, GenerationError, InvalidRequestError
from superfluid_core.placement.view import Load, NodeView, Offer
from superfluid_core.wire.messages import Embed, Embedded, Refuse
from superfluid_head.fleet.asks import EMBEDS_MAX, Asks
from superfluid_head.fleet.embeds import EMBED_TOKENS_MAX, EmbedRequest, embed

WANTED = EmbedRequest("m", "mean", (1, 2, 3))


class Node:
    """A node that answers every text with its own name, or refuses it."""

    def __init__(self, key: str, *, busy: int = 0, code: ErrorCode | None = None) -> None:
        self.key = key
        self.code = code
        self.asked: list[Embed] = []
        self.asks = Asks()
        self.is_linked = True
        self.view = NodeView(key)
        self.view.offers = {"m": Offer("w", 100, 4)}
        self.view.is_up = True
        self.view.load = Load(lanes_busy=busy)

    def send(self, message: Any) -> bool:
        self.asked.append(message)
        if not self.is_linked:
            return False
        if self.code is not None:
            return self.asks.refuse(Refuse(self.code, "no", 700, message.session, 0))
        data = self.key.encode() * 4
        for piece in range(2):
            half = data[piece * 2 : piece * 2 + 2]
            self.asks.take(Embedded(message.session, piece, 2, half))
        return True


def ask(*nodes: Node, wanted: EmbedRequest = WANTED) -> bytes:
    return asyncio.run(embed(nodes, wanted))  # type: ignore[arg-type]


def test_the_idlest_node_that_can_take_it_is_asked() -> None:
    busy, idle, down, narrow = Node("a", busy=3), Node("b"), Node("c"), Node("d")
    down.view.is_up = False
    narrow.view.offers = {"m": Offer("w", 2, 4)}
    assert ask(busy, idle, down, narrow) == b"bbbb"
    assert idle.asked[0].ids == (1, 2, 3)
    assert not busy.asked + down.asked + narrow.asked
    assert idle.asks.embeds == 0


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.OVERLOADED, ErrorCode.NODE_LOST])
def test_a_node_that_cannot_is_followed_by_the_next(code: ErrorCode) -> None:
    assert ask(Node("a", code=code), Node("b", busy=1)) == b"bbbb"
    gone = Node("a")
    gone.is_linked = False
    assert ask(gone, Node("b", busy=1)) == b"bbbb"


def test_refusals_keep_their_meaning_and_tries_have_an_end() -> None:
    with pytest.raises(InvalidRequestError) as wrong:
        ask(Node("a", code=ErrorCode.UNSUPPORTED), Node("b", busy=1))
    assert wrong.value.param == "input"
    nodes = [Node(name, code=ErrorCode.OVERLOADED) for name in "abcde"]
    with pytest.raises(CapacityError) as busy:
        ask(*nodes)
    assert busy.value.retry_after_ms == 700
    assert sum(len(node.asked) for node in nodes) == 3
    with pytest.raises(CapacityError) as nobody:
        ask()
    assert nobody.value.code is ErrorCode.NO_WORKER


def test_a_text_that_does_not_fit_its_frame_is_refused_with_the_limit() -> None:
    long = EmbedRequest("m", "mean", (1,) * (EMBED_TOKENS_MAX + 1))
    with pytest.raises(InvalidRequestError, match=str(EMBED_TOKENS_MAX)):
        ask(Node("a"), wanted=long)


def test_texts_of_a_node_are_bounded_and_fail_with_its_link() -> None:
    async def run() -> None:
        node = Node("a")
        node.send = lambda message: True  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:

            async def one() -> str:
                try:
                    await node.asks.embed(node, "m", "mean", (1,))
                except (CapacityError, GenerationError) as error:
                    return error.code.value
                return "answered"

            tasks = [group.create_task(one()) for _ in range(EMBEDS_MAX + 2)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert node.asks.embeds == EMBEDS_MAX
            node.asks.break_off()
        found = [task.result() for task in tasks]
        assert found == ["node_lost"] * EMBEDS_MAX + ["overloaded"] * 2
        assert not node.asks.refuse(Refuse(ErrorCode.FENCED, "x", None, 5, 0))

    asyncio.run(run())
