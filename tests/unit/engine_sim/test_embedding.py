"""Texts in the engine loop: turns with ticks, order, bounds, failures, and nothing left when the loop ends."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from superfluid_core.engine import embedding as embedding_module
from superfluid_core.engine.embedding import EMBEDDINGS_MAX, Embedding, EmbeddingLine, Outcome
from superfluid_core.engine.stand_ins import hashed_vector
from superfluid_core.errors import CapacityError, EngineError
from tests.unit.engine_sim.conftest import Bench
from tests.unit.engine_sim.test_loop import Rig, run, submit


def text(rig: Rig, ids: Sequence[int], said: list[Outcome], pooling: str = "mean") -> Embedding:
    def done(outcome: Outcome) -> None:
        said.append(outcome)
        rig.said.set()

    return Embedding(ids, pooling, done)


def test_texts_are_embedded_in_order_while_sessions_run() -> None:
    said: list[Outcome] = []

    async def body(rig: Rig) -> None:
        submit(rig, 1, max_output=50)
        for number in range(5):
            assert rig.loop.embed(text(rig, [number, 7], said))
        await rig.until(lambda: len(said) == 5 and rig.finish(1) is not None)
        assert len(rig.ids(1)) == 50
        assert rig.loop.embed(text(rig, [9], said, "last"))
        await rig.until(lambda: len(said) == 6)

    run(Rig, body)
    expected = [hashed_vector([number, 7], "mean", 0) for number in range(5)]
    assert said == [*expected, hashed_vector([9], "last", 0)]
    values = struct.unpack("<64f", expected[0])
    assert abs(math.hypot(*values) - 1) < 1e-6


def test_a_long_text_takes_turns_with_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten passes of a long text: the session beside it gets tokens between them, and ends before it does."""
    monkeypatch.setattr(embedding_module, "TURN_MS", 0)
    said: list[Outcome] = []
    seen: list[int] = []

    async def body(rig: Rig) -> None:
        long = text(rig, [1] * 80, said)
        step = long.step

        def counted(engine: Any, clock: Any) -> None:
            seen.append(len(rig.ids(1)))
            step(engine, clock)

        long.step = counted  # type: ignore[method-assign]
        assert rig.loop.embed(long)
        submit(rig, 1, max_output=6)
        await rig.until(lambda: bool(said) and rig.finish(1) is not None)

    rig = run(lambda: Rig(step_tokens=8), body)
    assert len(seen) == 10
    assert seen[-1] == 6
    assert rig.loop.steps >= 16


def test_a_turn_is_as_many_passes_as_begin_in_its_time() -> None:
    """Of passes of 60 ms four begin within a turn; of longer ones, one."""
    for pass_s, turns in ((0.06, 3), (0.5, 10)):
        bench = Bench(step_tokens=8, prefill_rate=8 / pass_s)
        long = Embedding([1] * 80, "mean", lambda _outcome: None)
        count = 0
        while long.outcome is None:
            long.step(bench.engine, bench.time)
            count += 1
        assert count == turns


def test_a_text_that_fails_is_told_so_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Outcome] = []
    full = CapacityError("no memory")

    def fail(self: Any, ids: Sequence[int], pooling: str) -> Iterator[bytes | None]:
        yield None
        raise full

    async def body(rig: Rig) -> None:
        monkeypatch.setattr(type(rig.engine), "embed", fail)
        assert rig.loop.embed(text(rig, [1], said))
        await rig.until(lambda: len(said) == 1)
        submit(rig, 1, max_output=3)
        await rig.until(lambda: rig.finish(1) is not None)

    run(Rig, body)
    assert said == [full]


def test_an_engine_that_breaks_over_a_text_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, ids: Sequence[int], pooling: str) -> Iterator[bytes | None]:
        yield from ()
        raise EngineError("broken")

    async def body(rig: Rig) -> None:
        monkeypatch.setattr(type(rig.engine), "embed", fail)
        assert rig.loop.embed(text(rig, [1], []))
        for _ in range(400):
            await asyncio.sleep(0.005)
            if rig.loop._failure is not None:
                break
        await asyncio.sleep(0.02)

    with pytest.raises(EngineError, match="broken"):
        run(Rig, body)


def test_the_line_is_bounded_in_order_and_drops_what_nobody_wants() -> None:
    line = EmbeddingLine()
    heard: list[Outcome] = []
    texts = [Embedding([n], "mean", heard.append) for n in range(EMBEDDINGS_MAX + 1)]
    assert [line.add(each) for each in texts] == [True] * EMBEDDINGS_MAX + [False]
    texts[1].is_wanted = lambda: False
    first = line.next()
    assert first is texts[0]
    assert line.next() is None
    line.settle(texts[0])
    assert line.next() is texts[0]
    texts[0].outcome = b"vector"
    line.settle(texts[0])
    assert heard == [b"vector"]
    assert line.next() is texts[2]
