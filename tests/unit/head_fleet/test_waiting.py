"""Refusals that a client hears: the head's own queue, nodes that promise nothing, completions that start too late."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.clock import MS, SECOND, SystemClock
from superfluid_core.errors import CapacityError, ErrorCode, SuperfluidError
from superfluid_core.limits import FleetLimits
from superfluid_core.session import FinishReason, QosClass
from superfluid_head.fleet.events import TokensEvent
from superfluid_head.fleet.generation import GenerationMachine
from superfluid_head.fleet.queue import Pace, WaitingRoom
from superfluid_head.fleet.transitions import (
    Advanced,
    Fail,
    Leave,
    Place,
    Placed,
    Postpone,
    RefusedByNode,
    Tick,
)


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 30))


# --- pure -------------------------------------------------------------------------------------------


def test_the_pace_is_the_time_between_places_and_idle_time_does_not_count() -> None:
    pace = Pace()
    assert pace.ns == 0
    pace.placed(0, 2 * SECOND)
    pace.placed(0, 4 * SECOND)
    assert pace.ns == 2 * SECOND
    pace.placed(1_000 * SECOND, 1_002 * SECOND)
    assert pace.ns == 2 * SECOND
    for second in range(1_003, 1_060):
        pace.placed(0, second * SECOND)
    assert pace.ns < 1.01 * SECOND


def refusal(room: WaitingRoom, session: int, pace_ns: int, **known: bool) -> CapacityError:
    with pytest.raises(CapacityError) as caught:
        room.judge_room(session, pace_ns, **known)
    assert session not in room
    return caught.value


def test_a_full_queue_names_its_drain_time_within_what_clients_heed() -> None:
    room = WaitingRoom(FleetLimits(queue_max=3))
    for session in range(1, 4):
        room.enter(session, QosClass.AGENT, 0)
        room.judge_room(session, 2 * SECOND)
    room.enter(4, QosClass.AGENT, 0)
    assert refusal(room, 4, 2 * SECOND).retry_after_ms == 6_000
    room.enter(5, QosClass.AGENT, 0)
    assert refusal(room, 5, 500 * SECOND).retry_after_ms == 120_000
    room.enter(6, QosClass.AGENT, 0)
    assert refusal(room, 6, MS).retry_after_ms == 1_000


def test_tokens_that_wait_are_bounded_but_a_lone_giant_may_wait() -> None:
    room = WaitingRoom(FleetLimits(queued_tokens_max=1_000))
    room.enter(1, QosClass.AGENT, 0, tokens=5_000)
    room.judge_room(1, SECOND)
    room.enter(2, QosClass.AGENT, 0, tokens=1)
    assert refusal(room, 2, SECOND).code is ErrorCode.QUEUE_FULL


def test_a_promise_is_judged_by_who_is_ahead_and_only_by_measured_figures() -> None:
    room = WaitingRoom(FleetLimits(ttft_slo_ms=2_500))
    for session in (1, 2):
        room.enter(session, QosClass.AGENT, 0)
        room.judge_room(session, SECOND)
    room.enter(3, QosClass.INTERACTIVE, 0)
    room.judge_room(3, SECOND)
    room.enter(4, QosClass.BACKGROUND, 0)
    room.judge_room(4, SECOND, is_measured=False)
    error = refusal(room, 4, SECOND)
    assert error.code is ErrorCode.SLO_UNATTAINABLE
    assert error.retry_after_ms == 1_500


PLACED = Placed("a", "boot", 1, "w", 1_000, frozenset(), 30)


def opened(kit: Any, **fields: Any) -> GenerationMachine:
    machine = GenerationMachine(replace(kit.request(), **fields), FleetLimits())
    machine.begin()
    machine.on_event(PLACED, 0)
    return machine


def test_a_node_that_promises_nothing_is_not_asked_again_and_its_word_is_the_answer(
    kit: Any,
) -> None:
    machine = opened(kit)
    first = machine.on_event(RefusedByNode(1, 1, ErrorCode.SLO_UNATTAINABLE, "late", 9_000), 0)
    assert [type(action) for action in first] == [Leave, Place]
    place = first[1]
    assert isinstance(place, Place)
    assert place.avoid == {"a"}
    assert not place.is_move
    machine.on_event(replace(PLACED, node="b", link=2), 0)
    second = machine.on_event(RefusedByNode(2, 2, ErrorCode.SLO_UNATTAINABLE, "later", 4_000), 0)
    place = second[-1]
    assert isinstance(place, Place)
    assert place.avoid == {"a", "b"}
    assert place.verdict is not None
    (fail,) = machine.on_event(place.verdict, 0)
    assert fail == Fail(ErrorCode.SLO_UNATTAINABLE, "later", 4_000)


def test_a_full_node_is_only_postponed(kit: Any) -> None:
    actions = opened(kit).on_event(RefusedByNode(1, 1, ErrorCode.QUEUE_FULL, "full", 50), 0)
    assert isinstance(actions[0], Postpone)
    assert isinstance(actions[-1], Place)
    assert actions[-1].verdict is None


def test_who_has_not_started_by_then_is_dropped_and_who_has_is_not(kit: Any) -> None:
    late = opened(kit, start_by_ns=100)
    assert late.on_event(Advanced(1, 1, 0, 8, 0), 0)
    assert late.on_event(Tick(), 99) == []
    actions = late.on_event(Tick(), 100)
    assert isinstance(actions[-1], Fail)
    assert actions[-1].code is ErrorCode.DEADLINE_EXCEEDED
    started = opened(kit, start_by_ns=100)
    started.on_event(Advanced(1, 1, 3, 8, 0), 0)
    assert started.on_event(Tick(), 1_000) == []


# --- over links -------------------------------------------------------------------------------------


async def failure(fleet: Any, request: Any) -> SuperfluidError:
    async def read_on() -> None:
        async with fleet.generate(request) as generation:
            async for _ in generation:
                pass

    with pytest.raises(SuperfluidError) as caught:
        await read_on()
    return caught.value


def test_all_nodes_that_promise_nothing_make_a_429_at_once(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = [kit.node(name) for name in "ab"]
        for node in nodes:
            node.refuse, node.refusals = ErrorCode.SLO_UNATTAINABLE, 1
        async with kit.fleet(*nodes) as fleet:
            began = time.monotonic()
            error = await failure(fleet, kit.request(1))
            assert error.code is ErrorCode.SLO_UNATTAINABLE
            assert error.retry_after_ms == 50
            assert time.monotonic() - began < 2
            assert [len(node.opens) for node in nodes] == [1, 1]
            assert fleet.health().waiting == fleet.health().running == 0
            nodes[0].refusals = nodes[1].refusals = 0
            assert (await reader(fleet, kit.request(2))).end.moves == 0

    run(scenario())


def test_one_node_that_promises_nothing_leaves_the_other(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = [kit.node(name) for name in "ab"]
        nodes[0].refuse, nodes[0].refusals = ErrorCode.SLO_UNATTAINABLE, 99
        async with kit.fleet(*nodes) as fleet:
            for number in range(6):
                told = await reader(fleet, kit.request(number, 3))
                assert told.end.moves == 0
            assert len(nodes[1].opens) == 6
            assert fleet.counters.faults == 0

    run(scenario())


class StepClock(SystemClock):
    """Time that passes by a node's steps: a busy machine makes it slow, and no reading of it uncertain."""

    def __init__(self, node: Any, step_ns: int) -> None:
        self._node, self._step_ns = node, step_ns
        self._began_ns = super().now_ns()

    def now_ns(self) -> int:
        return self._began_ns + int(self._node.steps) * self._step_ns


def test_the_hint_of_a_full_queue_is_the_time_after_which_there_is_room(
    kit: Any, reader: Any
) -> None:
    """One lane, a second each: who comes again after the hint finds the queue drained, and not long before."""

    async def scenario() -> None:
        steps = asyncio.Semaphore(0)
        node = kit.node("a", lanes=1, pause=steps.acquire)
        clock = StepClock(node, 50 * MS)

        async def proceed(count: int) -> None:
            target = node.steps + count
            for _ in range(count):
                steps.release()
            await until(lambda: node.steps == target)

        limits = FleetLimits(queue_max=2, sessions_over_lanes=0)
        async with (
            kit.fleet(node, fleet_limits=limits, clock=clock) as fleet,
            asyncio.TaskGroup() as group,
        ):

            async def ask(number: int, waiting: int) -> None:
                group.create_task(reader(fleet, kit.request(number, 20)))
                await until(lambda: fleet.health().waiting == waiting)

            group.create_task(reader(fleet, kit.request(0, 20)))
            await until(lambda: len(node.opens) == 1)
            await ask(1, 1)
            await ask(2, 2)
            await proceed(20)
            await until(lambda: len(node.opens) == 2)
            await proceed(10)
            await ask(3, 2)
            # one runs, two wait, and the pace has been measured once
            refused_ns = clock.now_ns()
            error = await failure(fleet, kit.request(8))
            assert error.code is ErrorCode.QUEUE_FULL
            assert error.retry_after_ms is not None
            await proceed(10)
            await until(lambda: len(node.opens) == 3)
            await proceed(20)
            await until(lambda: fleet.health().waiting == 0)
            drained_ms = (clock.now_ns() - refused_ns) / MS
            await proceed(20)
        assert drained_ms == 1_500
        assert 0.5 * drained_ms <= error.retry_after_ms <= 2.0 * drained_ms

    run(scenario())


def test_a_completion_that_waits_too_long_for_a_lane_is_dropped_everywhere(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        node = kit.node("a", lanes=1, step_s=0.02)
        async with kit.fleet(node) as fleet:
            start_by_ns = SystemClock().now_ns() + 300 * MS
            late = kit.request(2, qos=QosClass.COMPLETION, start_by_ns=start_by_ns)
            async with asyncio.TaskGroup() as group:
                first = group.create_task(reader(fleet, kit.request(1, 40)))
                await asyncio.sleep(0.05)
                error = await failure(fleet, late)
            assert error.code is ErrorCode.DEADLINE_EXCEEDED
            assert first.result().end is not None
            assert [cancel.session for cancel in node.cancels] == [node.opens[1].session]
            assert not node.queue

    run(scenario())


def test_a_crowd_of_one_tenant_leaves_the_lane_free_that_the_nodes_cap_keeps_for_others(
    kit: Any, reader: Any
) -> None:
    # found by `bench scenario fair`: the crowd took every place of the node, and others waited for one with a lane free
    async def scenario() -> None:
        node = kit.node("a", lanes=4, step_s=0.05, features=("files", "tenant-lanes-3"))
        async with kit.fleet(node) as fleet, asyncio.TaskGroup() as group:
            crowd = [
                group.create_task(reader(fleet, kit.request(number, 500, tenant="crowd")))
                for number in range(12)
            ]
            async with asyncio.timeout(10):
                while len(node.opens) < 5:  # noqa: ASYNC110 - it looks at a node
                    await asyncio.sleep(0.01)
            other = group.create_task(reader(fleet, kit.request(99, 2, tenant="other")))
            async with asyncio.timeout(10):
                while len(node.opens) < 6:  # noqa: ASYNC110 - it looks at a node
                    await asyncio.sleep(0.01)
            assert [each.tenant for each in node.opens] == ["crowd"] * 5 + ["other"]
            assert fleet.health().waiting == 7
            for task in (*crowd, other):
                task.cancel()

    run(scenario())


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - it looks at nodes
            await asyncio.sleep(0.01)


def test_a_request_that_waits_for_a_large_window_does_not_stop_one_that_fits_a_free_node(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        large = kit.node("large", lanes=1, step_s=0.05)
        small = kit.node("small", lanes=1, step_s=0.05, window=1_000)
        limits = FleetLimits(sessions_over_lanes=0)
        async with (
            kit.fleet(large, small, fleet_limits=limits) as fleet,
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(reader(fleet, kit.request(1, 2_000)))]
            await until(lambda: len(large.opens) == 1)
            tasks.append(group.create_task(reader(fleet, kit.request(2, 2_000))))
            await until(lambda: fleet.health().waiting == 1)
            tasks.append(group.create_task(reader(fleet, kit.request(3, 500))))
            await until(lambda: len(small.opens) == 1)
            assert len(large.opens) == 1
            for task in tasks:
                task.cancel()

    run(scenario())


def test_a_look_at_the_queue_asks_once_for_all_of_a_kind_also_while_a_node_is_down(
    kit: Any, reader: Any, monkeypatch: Any
) -> None:
    # found at 200 streams of `bench scenario kill`: with a dead node each token made the head judge everyone who waited
    async def scenario() -> None:
        nodes = [kit.node(name, lanes=1, step_s=0.05) for name in "ab"]
        limits = FleetLimits(sessions_over_lanes=0)
        async with kit.fleet(*nodes, fleet_limits=limits) as fleet, asyncio.TaskGroup() as group:
            await nodes[1].die()
            tasks = [group.create_task(reader(fleet, kit.request(n, 400))) for n in range(20)]
            await until(lambda: fleet.health().waiting == 19)
            desk, asked = fleet._runner._desk, []
            place = desk.place

            def counted(*each: Any) -> Any:
                asked.append(each)
                return place(*each)

            monkeypatch.setattr(desk, "place", counted)
            fleet._runner.pump()
            assert len(asked) == 1
            for task in tasks:
                task.cancel()

    run(scenario())


def test_an_output_that_is_stopped_while_it_waits_to_be_moved_takes_no_lane_any_more(
    kit: Any, reader: Any
) -> None:
    # found by the simulation's seed 1488: it was placed once more, without an OPEN, and the lane was never given back
    async def scenario() -> None:
        nodes = {name: kit.node(name, lanes=1, step_s=0.02) for name in "ab"}
        limits = FleetLimits(sessions_over_lanes=0)
        async with kit.fleet(*nodes.values(), fleet_limits=limits) as fleet:
            async with asyncio.TaskGroup() as group:
                rests = group.create_task(reader(fleet, kit.request(1, 60)))
                await until(lambda: any(node.running for node in nodes.values()))
                async with fleet.generate(kit.request(2, 500)) as generation:
                    async for event in generation:
                        if isinstance(event, TokensEvent):
                            break
                    await nodes[generation.node].die()
                    await until(lambda: fleet.health().waiting == 1)
                    generation.stop(1)
                    assert fleet.health().waiting == 0
                    await rests
                    end = await anext(generation)
                    assert end.reason is FinishReason.STOP
            assert fleet.counters.placements == 2
            assert (await reader(fleet, kit.request(3, 3))).end.moves == 0

    run(scenario())
