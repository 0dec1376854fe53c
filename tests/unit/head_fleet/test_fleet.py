"""The fleet over real loopback links: two or three fake nodes, and everything that may befall them."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.errors import (
    CapacityError,
    ErrorCode,
    GenerationError,
    InvalidRequestError,
    SuperfluidError,
)
from superfluid_core.limits import FleetLimits, LinkLimits
from superfluid_core.session import FinishReason, QosClass
from superfluid_head.fleet.fleet import EndEvent, MovedEvent, TokensEvent


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 30))


def test_an_answer_comes_whole_and_ends_once(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        async with kit.fleet(kit.node("a")) as fleet:
            request = kit.request()
            told = await reader(fleet, request)
            assert told.ids == kit.tokens_of(request)
            assert told.end == EndEvent(FinishReason.LENGTH, None, 0, 0)
            assert not any(isinstance(event, MovedEvent) for event in told.others)
            (record,) = fleet.why("req-1")
            assert record.node == "a"
            assert "a: " in record.scores[0]
            assert fleet.health().nodes[0].sessions == 0

    run(scenario())


def test_a_link_at_ease_is_looked_at_within_a_period_of_the_first_session_placed_there(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        async with kit.fleet(kit.node("a")) as fleet:
            (node,) = fleet._nodes.values()
            nap = node.standing.nap
            while (nap.left_s or 0.0) <= 0.2:  # noqa: ASYNC110 - nobody tells when it rests
                await asyncio.sleep(0.01)
            async with fleet.generate(kit.request()) as generation:
                async for _ in generation:
                    assert len(node.slots) == 0 or nap.left_s is None or nap.left_s <= 0.1

    run(scenario())


@pytest.mark.parametrize("cut", [1, 7, 29])
def test_a_node_killed_in_mid_answer_changes_nothing_for_the_reader(
    kit: Any, reader: Any, cut: Any
) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name) for name in "ab"}
        async with kit.fleet(*nodes.values()) as fleet:
            request = kit.request(11)

            async def kill(count: Any) -> None:
                if count == cut:
                    victim = next(node for node in nodes.values() if node.running)
                    await victim.die()

            told = await reader(fleet, request, kill)
            assert told.ids == kit.tokens_of(request)
            assert told.end is not None
            assert told.end.moves == 1
            resumed = next(node.opens[0] for node in nodes.values() if node.opens[0].epoch == 2)
            assert resumed.delivered == tuple(kit.tokens_of(request)[: len(resumed.delivered)])
            assert resumed.max_output == request.max_output
            assert len(resumed.delivered) >= cut
            assert [record.reason for record in fleet.why("req-11")] == ["new", "link cut"]

    run(scenario())


@pytest.mark.slow
def test_thirty_answers_survive_cuts_and_kills_unchanged(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = [kit.node(name, lanes=12, step_s=0.02) for name in "abc"]
        limits = FleetLimits(faults_to_open=100)
        async with kit.fleet(*nodes, fleet_limits=limits) as fleet:
            requests = [kit.request(number, 40) for number in range(30)]

            async def trouble() -> None:
                await asyncio.sleep(0.3)
                await nodes[0].cut()
                await asyncio.sleep(0.2)
                await nodes[1].die()

            results, _ = await asyncio.gather(
                asyncio.gather(*(reader(fleet, request) for request in requests)), trouble()
            )
            for request, told in zip(requests, results, strict=True):
                assert told.ids == kit.tokens_of(request)
            assert sum(told.end.moves for told in results) >= 10
            assert fleet.health().waiting == 0

    run(scenario())


def test_a_lonely_node_that_restarts_goes_on_with_the_answer(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            node = kit.node("a")
            async with kit.fleet(node) as fleet:
                request = kit.request(3)

                async def restart(count: Any) -> None:
                    if count == 5:
                        await node.die()
                        await node.start(group)

                told = await reader(fleet, request, restart)
                assert told.ids == kit.tokens_of(request)
                assert node.boots == 2

    run(scenario())


def test_a_row_that_skips_an_index_moves_the_session_and_blames_the_node(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name) for name in "ab"}
        async with kit.fleet(*nodes.values()) as fleet:
            request = kit.request(5)
            nodes["a"].skip_at = nodes["b"].skip_at = 10

            def heal(count: Any) -> None:
                if count == 9:
                    idle = next(node for node in nodes.values() if not node.running)
                    idle.skip_at = None

            told = await reader(fleet, request, heal)
            assert told.ids == kit.tokens_of(request)
            assert told.end.moves == 1
            assert fleet.counters.faults == 1

    run(scenario())


def test_a_prompt_that_kills_processes_is_quarantined_and_refused_afterwards(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        nodes = [kit.node(name, crash_at=4) for name in "abc"]
        async with kit.fleet(*nodes) as fleet:
            with pytest.raises(GenerationError) as caught:
                await reader(fleet, kit.request(6))
            assert caught.value.code is ErrorCode.REQUEST_QUARANTINED
            assert sum(node.boots for node in nodes) <= 5, "one request took two nodes at most"
            with pytest.raises(GenerationError) as again:
                fleet.generate(replace(kit.request(6), request_id="other"))
            assert again.value.code is ErrorCode.REQUEST_QUARANTINED
            assert not again.value.retryable

    run(scenario())


def test_busy_answers_are_waited_out(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        node = kit.node("a", refuse=ErrorCode.OVERLOADED, refusals=3)
        async with kit.fleet(node) as fleet:
            request = kit.request()
            told = await reader(fleet, request)
            assert told.ids == kit.tokens_of(request)
            assert told.end.moves == 0
            assert [opened.epoch for opened in node.opens] == [1, 2, 3, 4]

    run(scenario())


def test_a_final_refusal_reaches_the_caller_with_its_code(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        node = kit.node("a", refuse=ErrorCode.INVALID_GRAMMAR, refusals=9)
        async with kit.fleet(node) as fleet:
            with pytest.raises(InvalidRequestError) as caught:
                await reader(fleet, kit.request())
            assert caught.value.code is ErrorCode.INVALID_GRAMMAR
            assert len(node.opens) == 1

    run(scenario())


def test_a_draining_node_hands_its_sessions_over(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name) for name in "ab"}
        async with kit.fleet(*nodes.values()) as fleet:
            request = kit.request(9)

            def drain(count: Any) -> None:
                if count == 6:
                    next(node for node in nodes.values() if node.running).is_draining = True

            told = await reader(fleet, request, drain)
            assert told.ids == kit.tokens_of(request)
            assert fleet.counters.faults == 0

    run(scenario())


def test_a_stop_string_ends_at_its_count_and_cancels_at_once(kit: Any) -> None:
    async def scenario() -> None:
        node = kit.node("a")
        async with kit.fleet(node) as fleet:
            request = kit.request(4, 200)
            got: list[int] = []
            async with fleet.generate(request) as generation:
                async for event in generation:
                    if isinstance(event, TokensEvent):
                        got.extend(event.ids)
                        if len(got) >= 10:
                            generation.stop(8)
                    elif isinstance(event, EndEvent):
                        assert event == EndEvent(FinishReason.STOP, None, 0, 0)
            assert generation.machine.journal.ids == kit.tokens_of(request)[:8]
            await asyncio.sleep(0.05)
            assert len(node.cancels) == 1
            assert not node.running

    run(scenario())


def test_leaving_early_cancels_and_gives_everything_back(kit: Any) -> None:
    async def scenario() -> None:
        node = kit.node("a")
        async with kit.fleet(node) as fleet:
            async with fleet.generate(kit.request(4, 500)) as generation:
                async for event in generation:
                    if isinstance(event, TokensEvent):
                        break
            await asyncio.sleep(0.05)
            assert not node.running
            assert fleet.health().running == 0
            assert fleet.health().nodes[0].sessions == 0

    run(scenario())


def test_a_full_fleet_queues_in_the_head_and_places_the_moment_a_slot_frees(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        nodes = [kit.node(name, lanes=2) for name in "ab"]
        async with kit.fleet(*nodes) as fleet:
            requests = [kit.request(number, 10) for number in range(24)]
            readers = asyncio.gather(*(reader(fleet, request) for request in requests))
            await asyncio.sleep(0.03)
            assert all(node.sessions <= 4 for node in fleet.health().nodes)
            assert fleet.health().waiting >= 10
            for request, told in zip(requests, await readers, strict=True):
                assert told.ids == kit.tokens_of(request)
            assert all(node.peak == 2 for node in nodes)
            assert fleet.health().waiting == 0

    run(scenario())


def test_interactive_sessions_leave_the_queue_first(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        node = kit.node("a", lanes=1)
        async with kit.fleet(node) as fleet:
            backlog = [
                asyncio.ensure_future(reader(fleet, kit.request(n, 10, qos=QosClass.BACKGROUND)))
                for n in range(8)
            ]
            await asyncio.sleep(0.02)
            await reader(fleet, kit.request(50, 10, qos=QosClass.INTERACTIVE))
            assert sum(not task.done() for task in backlog) >= 3
            await asyncio.gather(*backlog)

    run(scenario())


def test_a_queue_that_is_full_refuses_with_a_hint(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        node = kit.node("a", lanes=1)
        async with kit.fleet(node, fleet_limits=FleetLimits(queue_max=2)) as fleet:
            results = await asyncio.gather(
                *(reader(fleet, kit.request(n, 10)) for n in range(8)), return_exceptions=True
            )
            refused = [result for result in results if isinstance(result, SuperfluidError)]
            assert len(refused) == 3
            for error in refused:
                assert isinstance(error, CapacityError)
                assert error.code is ErrorCode.QUEUE_FULL
                assert (error.retry_after_ms or 0) >= 1_000

    run(scenario())


def test_without_a_node_a_request_waits_and_then_says_no_worker(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        node = kit.node("a")
        async with kit.fleet(node, fleet_limits=FleetLimits(no_node_wait_ms=300)) as fleet:
            await node.die()
            await asyncio.sleep(0.05)
            assert [model.is_up for model in fleet.models()] == [False]
            assert not fleet.health().is_ready
            with pytest.raises(CapacityError) as caught:
                await reader(fleet, kit.request())
            assert caught.value.code is ErrorCode.NO_WORKER
            assert caught.value.retry_after_ms

    run(scenario())


def test_unknown_models_and_too_long_prompts_are_refused_at_once(kit: Any) -> None:
    async def scenario() -> None:
        async with kit.fleet(kit.node("a", window=64)) as fleet:
            with pytest.raises(InvalidRequestError) as caught:
                fleet.generate(replace(kit.request(), model="other"))
            assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
            with pytest.raises(InvalidRequestError) as caught:
                fleet.generate(kit.request(1, 62))
            assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED

    run(scenario())


def test_a_silent_node_is_suspect_then_dead_and_its_sessions_move(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name) for name in "ab"}
        limits = LinkLimits(suspect_ms=200, dead_ms=500)
        async with kit.fleet(*nodes.values(), link_limits=limits) as fleet:
            request = kit.request(8)

            def mute(count: Any) -> None:
                if count == 5:
                    victim = next(node for node in nodes.values() if node.running)
                    victim.is_mute = True
                    for link in victim._listener.links:
                        # what a frozen process does: it neither reads nor answers
                        link.transport.pause_reading()

            told = await reader(fleet, request, mute)
            assert told.ids == kit.tokens_of(request)
            assert [record.reason for record in fleet.why("req-8")] == ["new", "node silent"]

    run(scenario())


def test_a_session_that_stalls_while_the_node_works_moves_alone(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name) for name in "ab"}
        limits = LinkLimits(session_stalled_ms=400)
        async with kit.fleet(*nodes.values(), link_limits=limits) as fleet:
            request = kit.request(8)

            def forget(count: Any) -> None:
                if count == 5:
                    victim = next(node for node in nodes.values() if node.running)
                    victim.running.clear()

            told = await reader(fleet, request, forget)
            assert told.ids == kit.tokens_of(request)
            assert [record.reason for record in fleet.why("req-8")] == ["new", "session stalled"]

    run(scenario())


def test_a_crowd_spreads_evenly_over_equal_nodes(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = [kit.node(name, lanes=16) for name in "abcd"]
        async with kit.fleet(*nodes) as fleet:
            requests = [kit.request(number, 8) for number in range(64)]
            await asyncio.gather(*(reader(fleet, request) for request in requests))
            shares = Counter({node.name: len(node.opens) for node in nodes})
            assert max(shares.values()) / 16 <= 1.10

    run(scenario())


def named(fleet: Any, name: str) -> Any:
    return next(node for node in fleet.health().nodes if node.name == name)


def test_a_second_address_with_the_same_identity_is_refused_by_name(
    kit: Any, reader: Any, caplog: Any
) -> None:
    async def scenario() -> None:
        first, second = kit.node("twin"), kit.node("twin")
        async with asyncio.TaskGroup() as group:
            await second.start(group)
            other = kit.node("b")
            async with kit.fleet(other, first) as fleet:
                assert {node.name for node in fleet.health().nodes if node.is_up} == {"b", "twin"}
                fleet.relocate("b", "127.0.0.1", second.port)
                await other.die()
                async with asyncio.timeout(10):
                    while "'twin'" not in (state := named(fleet, "b")).detail:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                assert not state.is_up
            await second.die()

    run(scenario())


def test_a_head_with_another_key_says_so(kit: Any, tmp_path: Any, caplog: Any) -> None:
    from superfluid_core.clock import SystemClock
    from superfluid_core.link.keys import write_key_file
    from superfluid_head.fleet.fleet import Fleet, FleetOptions

    async def scenario() -> None:
        node = kit.node("a")
        async with asyncio.TaskGroup() as group:
            await node.start(group)
            keys = write_key_file(tmp_path / "other.key")
            fleet = Fleet(FleetOptions((node.address(),), "head-2", keys), SystemClock())
            running = group.create_task(fleet.run())
            assert not await fleet.wait_ready(0.5)
            (state,) = fleet.health().nodes
            assert "it trusts another key" in state.detail
            with pytest.raises(CapacityError):
                fleet.generate(kit.request())
            running.cancel()
            await node.die()

    run(scenario())


def test_a_stopping_head_ends_what_runs_with_an_error(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        node = kit.node("a")
        async with kit.fleet(node) as fleet:
            task = asyncio.ensure_future(reader(fleet, kit.request(1, 1_000)))
            await asyncio.sleep(0.1)
        with pytest.raises(CapacityError) as caught:
            await task
        assert caught.value.code is ErrorCode.DRAINING

    run(scenario())
