"""The engine loop with a real scheduler and the simulated engine: effects, interrupts, failures, no thread left behind."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from superfluid_core.clock import MS, SystemClock
from superfluid_core.engine import loop as loop_module
from superfluid_core.engine.embedding import Embedding
from superfluid_core.engine.loop import TIME_MS, EngineLoop
from superfluid_core.engine.script import load_script
from superfluid_core.engine.sim import SimEngine, SimOptions, ThreadPause
from superfluid_core.errors import EngineError, ErrorCode
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import (
    Accepted,
    Cancel,
    Effect,
    Emits,
    Finish,
    Interrupt,
    Progress,
    StepDone,
    Submit,
    TickDone,
    TickPlan,
)
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import FinishReason, SessionKey
from tests.unit.engine_sim.conftest import EOS, TEXTS, Bench, spec_of

CLOCK = SystemClock()


class Rig:
    """A loop under test, with everything that it said."""

    def __init__(self, script: str = "", lanes: int = 4, **options: Any) -> None:
        sim = SimOptions(lanes=lanes, blocks=256, eos_probability=0.0, **options)
        self.engine = SimEngine(
            TEXTS, sim, CLOCK, pause=ThreadPause(), script=load_script(script, TEXTS)
        )
        limits = SchedulerLimits(lanes=lanes, step_tokens=sim.step_tokens)
        pool = PoolShape(sim.block_tokens, sim.blocks, sim.window)
        self.scheduler = Scheduler(limits, pool, cuts_are_free=True)
        self.effects: list[Effect] = []
        self.batches: list[int] = []
        self.said = asyncio.Event()
        self.loop = EngineLoop(self.scheduler, self.engine, CLOCK, self.hear)

    def hear(self, effects: list[Effect]) -> None:
        assert not any(isinstance(effect, Interrupt) for effect in effects)
        self.effects += effects
        self.batches.append(len(effects))
        self.said.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.said.clear()
                await self.said.wait()

    def ids(self, number: int) -> list[int]:
        columns = [each for each in self.effects if isinstance(each, Emits)]
        return [row.token for each in columns for row in each if row.key.session == number]

    def finish(self, number: int) -> Finish | None:
        found = [e for e in self.effects if isinstance(e, Finish) and e.key.session == number]
        assert len(found) <= 1
        return found[0] if found else None


def run(rig_of: Callable[[], Rig], body: Callable[[Rig], Awaitable[None]]) -> Rig:
    """Run `body` beside the loop, then cancel the loop; no thread may be left."""

    async def main() -> Rig:
        rig = rig_of()
        owner = asyncio.get_running_loop().create_task(rig.loop.run())
        try:
            await body(rig)
        finally:
            owner.cancel()
            await asyncio.wait({owner})
        if not owner.cancelled():
            owner.result()
        return rig

    rig = asyncio.run(main())
    assert not [it for it in threading.enumerate() if it.name == "superfluid-engine"]
    return rig


def submit(rig: Rig, number: int, prompt: str = "hello", **fields: Any) -> None:
    rig.loop.submit(Submit(spec_of(prompt, key=SessionKey("h", number), **fields)))


def test_sessions_run_to_their_ends_and_equal_the_plan_by_hand() -> None:
    async def body(rig: Rig) -> None:
        for number in range(1, 7):
            submit(rig, number, f"prompt {number}", max_output=20)
        await rig.until(lambda: all(rig.finish(number) for number in range(1, 7)))

    rig = run(Rig, body)
    for number in range(1, 7):
        by_hand = Bench(eos_probability=0.0).prefill([spec_of(f"prompt {number}")], 20)[0]
        assert rig.ids(number) == by_hand
        finish = rig.finish(number)
        assert finish is not None
        assert finish.reason is FinishReason.LENGTH
    assert rig.loop.steps >= 20
    assert not rig.loop.is_busy


def test_acceptance_is_told_before_submit_returns() -> None:
    async def body(rig: Rig) -> None:
        submit(rig, 1)
        assert isinstance(rig.effects[0], Accepted)
        await rig.until(lambda: rig.finish(1) is not None)

    rig = run(Rig, body)
    kinds = [type(effect) for effect in rig.effects]
    assert kinds.index(Progress) < kinds.index(Emits) < kinds.index(Finish)


def test_an_idle_loop_plans_when_something_comes_not_when_a_timer_fires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "TIME_MS", 3_600_000)

    async def body(rig: Rig) -> None:
        await asyncio.sleep(0.05)
        for number in (1, 2):
            submit(rig, number, max_output=3)
            await rig.until(lambda number=number: rig.finish(number) is not None)  # type: ignore[misc]

    run(Rig, body)


def test_a_cancel_ends_a_running_session_at_the_next_step() -> None:
    async def body(rig: Rig) -> None:
        submit(rig, 1, max_output=1000)
        await rig.until(lambda: len(rig.ids(1)) >= 3)
        rig.loop.submit(Cancel(SessionKey("h", 1)))
        ended = rig.finish(1)
        assert ended is not None
        assert ended.reason is FinishReason.CANCELLED
        seen = len(rig.ids(1))
        await asyncio.sleep(0.1)
        assert len(rig.ids(1)) == seen
        submit(rig, 2, max_output=2)
        await rig.until(lambda: rig.finish(2) is not None)

    run(lambda: Rig(decode_rate=100.0), body)


def test_inputs_that_effects_cause_are_handled_after_them() -> None:
    class Cancelling(Rig):
        def hear(self, effects: list[Effect]) -> None:
            super().hear(effects)
            if any(isinstance(effect, Emits) for effect in effects):
                self.loop.submit(Cancel(SessionKey("h", 1)))
                assert self.finish(1) is None  # not in the midst of these effects

    async def body(rig: Rig) -> None:
        submit(rig, 1, max_output=100)
        await rig.until(lambda: rig.finish(1) is not None)

    rig = run(Cancelling, body)
    finish = rig.finish(1)
    assert finish is not None
    assert finish.reason is FinishReason.CANCELLED


def test_a_deadline_passes_while_the_queue_waits_for_a_long_step() -> None:
    async def body(rig: Rig) -> None:
        submit(rig, 1, max_output=50)
        submit(rig, 2, max_output=5, deadline_ns=CLOCK.now_ns() + 100_000_000)
        await rig.until(lambda: rig.finish(2) is not None)

    rig = run(lambda: Rig(lanes=1, decode_rate=1.0), body)
    finish = rig.finish(2)
    assert finish is not None
    assert finish.reason is FinishReason.DEADLINE


def test_a_crash_of_the_engine_ends_run_with_its_error() -> None:
    async def body(rig: Rig) -> None:
        submit(rig, 1)
        await asyncio.sleep(0.3)

    with pytest.raises(EngineError, match="scripted crash"):
        run(lambda: Rig('{"pieces": ["abc"], "fault": "crash", "fault_at": 1}'), body)


def test_a_bug_in_the_engine_is_an_engine_error_too() -> None:
    class Broken(SimEngine):
        def run(self, plan: TickPlan, *_: Any) -> TickDone:
            raise ZeroDivisionError("tick")

    def rig_of() -> Rig:
        rig = Rig()
        rig.engine.__class__ = Broken
        return rig

    async def body(rig: Rig) -> None:
        submit(rig, 1)
        await asyncio.sleep(0.2)

    with pytest.raises(EngineError, match="ZeroDivisionError"):
        run(rig_of, body)


def test_a_hung_engine_is_visible_and_is_left_behind_on_stop() -> None:
    async def body(rig: Rig) -> None:
        submit(rig, 1, "x", max_output=50)
        await rig.until(lambda: len(rig.ids(1)) == 2)
        steps = rig.loop.steps
        await asyncio.sleep(0.15)
        assert rig.loop.is_busy
        assert rig.loop.steps == steps
        assert CLOCK.now_ns() - rig.loop.step_started_ns > 100_000_000

    rig = Rig
    run(lambda: rig('{"pieces": ["abcdef"], "fault": "hang", "fault_at": 2}'), body)


class Handover(queue.SimpleQueue[Any]):
    """Notes how long ago the running step is said to have begun, at the moment when a plan is handed over."""

    def __init__(self, loop: EngineLoop) -> None:
        super().__init__()
        self.loop = loop
        self.ages_ns: list[int] = []

    def put(self, item: Any, *rest: Any, **more: Any) -> None:
        if item is not None:
            self.ages_ns.append(CLOCK.now_ns() - self.loop.step_started_ns)
        super().put(item, *rest, **more)


class Watching:
    """Counts plans and the ticks that went on with a foreseen one."""

    def __init__(self) -> None:
        self.plans: list[int] = []
        self.followed: list[int] = []

    def planned(self, plan: TickPlan, elapsed_ns: int) -> None:
        assert elapsed_ns >= 0
        self.plans.append(plan.tick)

    def stepped(self, done: StepDone) -> None: ...

    def ticked(self, done: TickDone) -> None:
        if done.is_followed:
            self.followed.append(done.tick)


def test_a_steady_batch_goes_on_from_tick_to_tick_without_the_event_loop() -> None:
    watching = Watching()

    def rig_of() -> Rig:
        rig = Rig(decode_rate=200.0)
        rig.loop._watch = watching
        return rig

    async def body(rig: Rig) -> None:
        for number in (1, 2):
            submit(rig, number, f"prompt {number}", max_output=200, stop_ids=frozenset())
        await rig.until(lambda: len(watching.followed) >= 3)
        await rig.until(lambda: rig.finish(1) is not None and rig.finish(2) is not None)

    rig = run(rig_of, body)
    for number in (1, 2):
        spec = spec_of(f"prompt {number}", stop_ids=frozenset())
        assert rig.ids(number) == Bench(eos_probability=0.0).prefill([spec], 200)[0]
    assert watching.plans == sorted(set(watching.plans)), "every tick is told once"
    assert {tick + 1 for tick in watching.followed} <= set(watching.plans)


def test_steps_longer_than_the_looks_at_the_time_between_are_foreseen_as_well() -> None:
    """Looks at the time took the next plan back: with steps over 100 ms no tick ever followed another without the event loop."""
    watching = Watching()
    late_ns: list[int] = []

    def rig_of() -> Rig:
        rig = Rig(decode_rate=1e3 / (1.5 * TIME_MS))
        rig.loop._watch = watching
        return rig

    async def body(rig: Rig) -> None:
        submit(rig, 1, "prompt 1", max_output=8, stop_ids=frozenset())
        at_ns = CLOCK.now_ns() + 5 * TIME_MS * MS
        submit(rig, 2, "prompt 2", max_output=8, stop_ids=frozenset(), deadline_ns=at_ns)
        await rig.until(lambda: rig.finish(2) is not None)
        late_ns.append(CLOCK.now_ns() - at_ns)
        await rig.until(lambda: rig.finish(1) is not None)

    rig = run(rig_of, body)
    last = rig.finish(2)
    assert last is not None
    assert last.code is ErrorCode.DEADLINE_EXCEEDED, "deadlines pass although a plan is ahead"
    assert 0 <= late_ns[0] < 2_000 * MS
    assert len(rig.ids(1)) == 8
    assert len(watching.followed) >= 2


def test_whoever_comes_is_served_although_the_engine_has_its_next_plan() -> None:
    """Newcomers, cancels and texts of embeddings come at any place of a tick, foreseen plans are taken all the while."""
    watching = Watching()
    vectors: list[object] = []

    def rig_of() -> Rig:
        rig = Rig(decode_rate=1000.0)
        rig.loop._watch = watching
        return rig

    async def body(rig: Rig) -> None:
        submit(rig, 1, "long", max_output=3000, stop_ids=frozenset())
        await rig.until(lambda: len(watching.followed) >= 1)
        for number in range(2, 22):
            submit(rig, number, f"prompt {number}", max_output=1 + number % 7)
            if number % 5 == 0:
                assert rig.loop.embed(Embedding((1, 2), "mean", vectors.append))
            await rig.until(lambda number=number: len(rig.ids(number)) > 0)  # type: ignore[misc]
            if number % 3 == 0:
                rig.loop.submit(Cancel(SessionKey("h", number)))
            await rig.until(lambda number=number: rig.finish(number) is not None)  # type: ignore[misc]
        rig.loop.submit(Cancel(SessionKey("h", 1)))
        await rig.until(lambda: rig.finish(1) is not None)
        while len(vectors) < 4:  # noqa: ASYNC110 - told by a callback
            await asyncio.sleep(0.01)

    rig = run(rig_of, body)
    by_hand = Bench(eos_probability=0.0).prefill([spec_of("long", stop_ids=frozenset())], 3000)[0]
    said = rig.ids(1)
    assert said == by_hand[: len(said)]


def test_an_engine_that_idled_is_not_taken_for_a_hung_one_when_work_comes() -> None:
    """Met when a watchdog looked between the handing over of a plan and the engine thread's taking it."""
    handovers: list[Handover] = []

    def rig_of() -> Rig:
        rig = Rig()
        handovers.append(Handover(rig.loop))
        rig.loop._plans = handovers[0]
        return rig

    async def body(rig: Rig) -> None:
        for number in (1, 2):
            await asyncio.sleep(0.3)
            submit(rig, number, "x", max_output=2)
            await rig.until(lambda number=number: rig.finish(number) is not None)  # type: ignore[misc]

    run(rig_of, body)
    assert len(handovers[0].ages_ns) >= 2
    assert max(handovers[0].ages_ns) < 200_000_000


class Stuck(SimEngine):
    """Its texts wait for a release on their way to a vector."""

    release: threading.Event

    def embed(self, ids: Sequence[int], pooling: str) -> Iterator[bytes | None]:
        self.release.wait(10)
        yield b"\0\0\0\0"


def test_an_engine_that_hangs_over_a_text_is_busy_without_any_session() -> None:
    outcomes: list[object] = []
    release = threading.Event()

    def rig_of() -> Rig:
        rig = Rig()
        rig.engine.__class__ = Stuck
        rig.engine.release = release  # type: ignore[attr-defined]
        return rig

    async def body(rig: Rig) -> None:
        await asyncio.sleep(0.2)
        busy = [rig.loop.is_busy]
        assert rig.loop.embed(Embedding((1, 2), "mean", outcomes.append))
        await asyncio.sleep(0.1)
        busy.append(rig.loop.is_busy)
        assert 50_000_000 < CLOCK.now_ns() - rig.loop.step_started_ns < 200_000_000
        release.set()
        while not outcomes:  # noqa: ASYNC110 - told by a callback
            await asyncio.sleep(0.01)
        assert [*busy, rig.loop.is_busy] == [False, True, False]

    run(rig_of, body)
    assert outcomes == [b"\0\0\0\0"]


def test_stopping_in_the_middle_of_a_long_step_takes_no_longer_than_the_grace() -> None:
    async def body(rig: Rig) -> None:
        submit(rig, 1)
        await asyncio.sleep(0.1)

    began = CLOCK.now_ns()
    run(lambda: Rig(prefill_rate=0.01), body)
    assert CLOCK.now_ns() - began < 2_000_000_000


def test_scripted_end_of_text_is_emitted_and_ends_the_session() -> None:
    async def body(rig: Rig) -> None:
        submit(rig, 1)
        await rig.until(lambda: rig.finish(1) is not None)

    rig = run(lambda: Rig('{"pieces": ["hi", {"eos": true}]}'), body)
    assert rig.ids(1) == [104, 105, EOS]
    finish = rig.finish(1)
    assert finish is not None
    assert finish.stop_id == EOS
