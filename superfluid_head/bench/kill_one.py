"""One answer unbroken, then the same one with the node that serves it killed at a chosen piece of text.

Owns the comparison of the two and the length of the pause; it renews nothing and decides no bar. A gap is the longest time
between two pieces of text from the kill on.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from superfluid_core.clock import SystemClock
from superfluid_head.bench.load import Answer, OnChunk, chat, chat_body, http_client
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import Draws, prose
from superfluid_head.bench.rig import RigError
from superfluid_head.bench.small_fleet import SmallFleet


@dataclass(frozen=True, slots=True)
class Run:
    """One kill. `differs_at` is the first differing character, None when the texts are equal."""

    number: int
    node: str
    killed_at: int
    unbroken: Answer
    moved: Answer
    gap_ms: float

    @property
    def differs_at(self) -> int | None:
        return first_difference(self.unbroken.text, self.moved.text)

    @property
    def is_complete(self) -> bool:
        return self.moved.is_complete and len(self.moved.at_ms) > self.killed_at

    @property
    def is_usage_equal(self) -> bool:
        return self.moved.completion_tokens == self.unbroken.completion_tokens


def first_difference(a: str, b: str) -> int | None:
    """Where two texts part; None when they are equal."""
    if a == b:
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def killer(fleet: SmallFleet, at_chunk: int) -> tuple[OnChunk, list[float]]:
    """Give a callback that SIGKILLs the serving node at the `at_chunk`-th piece, and the time when it did.

    Who serves is asked at the first piece, so that the asking does not stretch the gap.
    """
    killed_ms: list[float] = []

    def on_chunk(answer: Answer) -> None:
        if answer.node is None:
            answer.node = fleet.serving().name
        if not killed_ms and len(answer.at_ms) >= at_chunk:
            fleet.rig.named(answer.node).signal(signal.SIGKILL)
            killed_ms.append(fleet.rig.now_ms())

    return on_chunk, killed_ms


def one_run(fleet: SmallFleet, number: int, draws: Draws, max_tokens: int, **members: Any) -> Run:
    """Compare at a drawn token; the killed node stays dead."""
    at_chunk = 2 + draws.below(max(1, max_tokens * 3 // 4))
    body = chat_body(
        fleet.served, "Tell a story. " + prose(number, 30), max_tokens, ignore_eos=True, **members
    )
    return run_of(fleet, number, body, at_chunk)


def run_of(
    fleet: SmallFleet, number: int, body: dict[str, Any], at_chunk: int, **headers: str
) -> Run:
    """Compare the answers to `body`, the second one's node killed at its `at_chunk`-th piece. Raises RigError."""
    clock = SystemClock()

    async def both() -> tuple[Answer, Answer]:
        async with http_client() as client:
            client.headers.update({name.replace("_", "-"): each for name, each in headers.items()})
            unbroken = await chat(client, fleet.url, body, clock)
            return unbroken, await chat(client, fleet.url, body, clock, on_chunk)

    on_chunk, killed_ms = killer(fleet, at_chunk)
    unbroken, moved = run(both())
    if not killed_ms or moved.node is None:
        raise RigError(f"no node was killed: {moved.error or 'the answer was too short'}")
    fleet.rig.named(moved.node).process.wait(timeout=10)
    times = [t for t in moved.at_ms if t >= moved.at_ms[at_chunk - 1]]
    gap_ms = max((b - a for a, b in pairwise(times)), default=0.0)
    return Run(number, moved.node, at_chunk, unbroken, moved, gap_ms)
