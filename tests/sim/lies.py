"""What faults reach, and a node that lies: it sends other TOKENS than its engine made.

Each forgery is one that the head can tell from the truth by its own rules: order, length, vocabulary, epoch, link. Wrong ids in the right
place are not among them: nobody but the engine knows those.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from superfluid_core.link.link import Link
from superfluid_core.wire.messages import Message, TokenRow, Tokens
from superfluid_head.fleet.nodestate import JOINED
from tests.sim.checks import Checks, forged
from tests.sim.head import Load, SimHead
from tests.sim.network import Network
from tests.sim.node import SimNode
from tests.sim.world import World

FORGERIES = (
    "duplicate", "skip", "swap", "too long", "bad id", "other epoch", "other link", "replay", "past the end",
)  # fmt: skip


@dataclass
class Scene:
    """Everything that a fault can reach."""

    world: World
    network: Network
    nodes: list[SimNode]
    heads: list[SimHead]
    checks: Checks
    drawn: random.Random
    load: Load
    busy_until_ns: int = 0
    starved: dict[tuple[str, str], int] = field(default_factory=dict)
    sent: dict[str, deque[Tokens]] = field(default_factory=dict)
    delayed: dict[str, Message] = field(default_factory=dict)

    def count(self, name: str, by: int = 1) -> None:
        self.checks.count(name, by)

    def up_nodes(self) -> list[SimNode]:
        return [node for node in self.nodes if node.is_up and not node.is_leaving]


class Liar:
    """Speaks for the nodes that are `faulty` just now."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.drawn = scene.drawn

    def distort(self, name: str, _link: Link, message: Tokens) -> list[Message] | None:
        """What a faulty node sends instead of `message`; None: the message itself."""
        kind = ""
        for node in self.scene.nodes:
            if node.faulty and node.identity == name:
                kind = node.faulty
        kept = self.scene.sent.get(name)
        if kept is None:
            kept = self.scene.sent[name] = deque(maxlen=6)
        held = self.scene.delayed.pop(name, None)
        if held is not None:
            return [message, held]
        if kind == "replay" and kept:
            self.scene.count("forged")
            return [message, self.drawn.choice(kept)]
        kept.append(message)
        rows = list(message.rows)
        place = self.drawn.randrange(len(rows)) if kind and rows else 0
        if not kind or not rows or not rows[place].ids:
            return None
        self.scene.count("forged")
        if kind == "swap":
            self.scene.delayed[name] = message
            return [Tokens((forged(rows[place], session=1, epoch=1),))]
        if kind == "duplicate":
            return [message, message]
        rows[place] = self._forge(kind, rows[place], name)
        return [Tokens(tuple(rows))]

    def _forge(self, kind: str, row: TokenRow, name: str) -> TokenRow:
        match kind:
            case "skip":
                return forged(row, first=row.first + 1)
            case "too long":
                return forged(row, ids=row.ids + (5,) * 500, logprobs=())
            case "past the end":
                if row.finish is None:
                    return row
                return forged(row, ids=(*row.ids, 5), finish=None, stop_id=None, logprobs=())
            case "bad id":
                return forged(row, ids=(*row.ids[:-1], 5_000))
            case "other epoch":
                return forged(row, epoch=max(1, row.epoch + self.drawn.choice((-1, 1))))
            case _:
                return self._foreign(row, name)

    def _foreign(self, row: TokenRow, name: str) -> TokenRow:
        """Tokens for a session that is placed on another node: right epoch, right index, wrong link."""
        for head in self.scene.heads:
            if head.fleet is None:
                continue
            for session, generation in head.fleet._runner.generations.items():
                journal: Any = generation.machine.journal
                slot = generation.waiting.slot
                if slot is not None and slot.key.removeprefix(JOINED) != name:
                    ids = tuple(5 for _ in row.ids)
                    return forged(
                        row, session=session, epoch=journal.epoch, first=len(journal.ids),
                        ids=ids, logprobs=(), finish=None, stop_id=None,
                    )  # fmt: skip
        return row
