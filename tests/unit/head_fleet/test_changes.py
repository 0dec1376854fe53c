"""A fleet that changes while it serves: drains, nodes files, slow starts, and what is told about it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.blockhash import block_chain, root_hash
from superfluid_core.errors import CapacityError
from superfluid_core.limits import FleetLimits
from superfluid_core.wire.messages import Prefix
from superfluid_head.fleet.chronicle import EVENTS_KEPT_MAX, LISTENERS_MAX
from superfluid_head.fleet.fleet import MovedEvent, NodeAddress, TokensEvent
from superfluid_head.fleet.relief import WARM_TOKENS


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 30))


async def until(claim: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not claim():  # noqa: ASYNC110 - looks into the fleet
            await asyncio.sleep(0.01)


# --- drains -----------------------------------------------------------------------------------------


def test_a_drained_node_gets_nothing_new_and_everything_again_when_undrained(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name) for name in "ab"}
        async with kit.fleet(*nodes.values()) as fleet:
            fleet.drain("a", 60_000)
            for number in range(6):
                await reader(fleet, kit.request(number, 2))
            assert [len(node.opens) for node in nodes.values()] == [0, 6]
            assert fleet.health().nodes[0].is_draining
            fleet.undrain("a")
            await until(lambda: not fleet.health().nodes[0].is_draining)
            for number in range(6):
                await reader(fleet, kit.request(number, 2))
            assert len(nodes["a"].opens) > 0

    run(scenario())


def test_a_drained_node_is_used_again_when_it_has_restarted_but_not_after_a_mere_cut(
    kit: Any,
) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            node = kit.node("a")
            async with kit.fleet(node, kit.node("b")) as fleet:

                def state() -> Any:
                    return fleet.health().nodes[0]

                fleet.drain("a", 60_000)
                await node.cut()
                await until(lambda: not state().is_up)
                await until(lambda: state().is_up)
                assert state().is_draining
                await node.die()
                await until(lambda: not state().is_up)
                await node.start(group)
                await until(lambda: state().is_up)
                assert not state().is_draining

    run(scenario())


def test_what_runs_on_a_drained_node_ends_there_within_the_grace(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name) for name in "ab"}
        async with kit.fleet(*nodes.values()) as fleet:

            def drain(count: Any) -> None:
                if count == 3:
                    fleet.drain(next(node.name for node in nodes.values() if node.running), 60_000)

            told = await reader(fleet, kit.request(1, 40), drain)
            assert told.end.moves == 0

    run(scenario())


def test_after_the_grace_sessions_move_while_the_old_node_still_speaks(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name, step_s=0.01) for name in "ab"}
        async with kit.fleet(*nodes.values()) as fleet:
            request = kit.request(21, 120)
            old: list[Any] = []

            def drain(count: Any) -> None:
                if count == 5:
                    old.append(next(node for node in nodes.values() if node.running))
                    fleet.drain(old[0].name, 0)

            told = await reader(fleet, request, drain)
            assert told.ids == kit.tokens_of(request)
            assert told.end.moves == 1
            (new,) = (node for node in nodes.values() if node is not old[0])
            warming, moved = new.opens
            # it keeps its lane until it is cancelled: who waits there does not get it
            assert (warming.epoch, warming.max_output) == (1, WARM_TOKENS)
            # and it is nobody in mid-sentence, whom a node would let go before others
            assert not warming.delivered
            assert (moved.session, moved.epoch) == (old[0].opens[0].session, 2)
            assert warming.session != moved.session
            context = len(warming.prompt)
            assert warming.prompt == (moved.prompt + moved.delivered)[:context]
            assert len(moved.prompt + moved.delivered) > context, "the old node was heard meanwhile"
            assert fleet.counters.faults == 0
            assert [state.sessions for state in fleet.health().nodes] == [0, 0]
            assert [record.reason for record in fleet.why("req-21")] == ["new", "node draining"]

    run(scenario())


@pytest.mark.slow
def test_a_rolling_drain_under_load_loses_nothing(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = [kit.node(name, lanes=8, step_s=0.02) for name in "abc"]
        async with kit.fleet(*nodes) as fleet:
            requests = [kit.request(number, 100) for number in range(12)]

            async def roll() -> None:
                for node in nodes:
                    await asyncio.sleep(0.2)
                    fleet.drain(node.name, 0)
                    await until(lambda node=node: not node.running)
                    fleet.undrain(node.name)

            results, _ = await asyncio.gather(
                asyncio.gather(*(reader(fleet, request) for request in requests)), roll()
            )
            for request, told in zip(requests, results, strict=True):
                assert told.ids == kit.tokens_of(request)
            assert sum(told.end.moves for told in results) >= 12
            assert fleet.counters.faults == 0
            assert [state.sessions for state in fleet.health().nodes] == [0, 0, 0]

    run(scenario())


def test_the_only_node_goes_on_with_what_it_has_though_it_drains(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        node = kit.node("a")
        async with kit.fleet(node) as fleet:

            def drain(count: Any) -> None:
                if count == 3:
                    fleet.drain("a", 0)

            told = await reader(fleet, kit.request(1, 80), drain)
            assert told.end.moves == 0
            assert len(node.opens) == 1

    run(scenario())


def test_a_reader_that_leaves_during_a_warming_leaves_nothing_behind(kit: Any) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name, step_s=0.05) for name in "ab"}
        async with kit.fleet(*nodes.values()) as fleet:
            async with fleet.generate(kit.request(1, 200)) as generation:
                async for event in generation:
                    if isinstance(event, TokensEvent) and event.first == 2:
                        old = next(node for node in nodes.values() if node.running)
                        new = next(node for node in nodes.values() if node is not old)
                        new.step_s = 5.0
                        fleet.drain(old.name, 0)
                        await until(lambda new=new: new.opens)
                        break
            await until(lambda: not any(node.running for node in nodes.values()))
            await until(lambda: not any(state.sessions for state in fleet.health().nodes))

    run(scenario())


def test_a_node_that_dies_while_its_sessions_are_warmed_elsewhere_changes_nothing(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name, step_s=0.03) for name in "abc"}
        async with kit.fleet(*nodes.values()) as fleet:
            request = kit.request(5, 30)

            async def drain_and_die(count: Any) -> None:
                if count == 4:
                    old = next(node for node in nodes.values() if node.running)
                    fleet.drain(old.name, 0)
                    await until(lambda: sum(len(node.opens) for node in nodes.values()) > 1)
                    await old.die()

            told = await reader(fleet, request, drain_and_die)
            assert told.ids == kit.tokens_of(request)
            await until(lambda: not any(state.sessions for state in fleet.health().nodes))

    run(scenario())


# --- nodes that come and go ---------------------------------------------------------------------------


def test_nodes_join_and_leave_a_running_fleet_and_answers_survive(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            first, second = kit.node("a", step_s=0.01), kit.node("b", step_s=0.01)
            await second.start(group)
            limits = FleetLimits(drain_grace_ms=0)
            async with kit.fleet(first, fleet_limits=limits) as fleet:
                request = kit.request(2, 150)

                async def swap(count: Any) -> None:
                    if count == 5:
                        changes = fleet.reload((first.address("a"), second.address("b")))
                        assert (changes.added, changes.removed) == (("b",), ())
                        await until(lambda: len(fleet.models()[0].nodes) == 2)
                        assert fleet.reload((second.address("b"),)).removed == ("a",)

                told = await reader(fleet, request, swap)
                assert told.ids == kit.tokens_of(request)
                assert told.end.moves == 1
                await until(lambda: [state.name for state in fleet.health().nodes] == ["b"])
                assert fleet.counters.faults == 0
                assert (await reader(fleet, kit.request(3))).end.moves == 0
            await second.die()

    run(scenario())


def test_a_node_that_is_named_again_while_it_leaves_simply_stays(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = [kit.node(name) for name in "ab"]
        async with kit.fleet(*nodes) as fleet:
            everybody = [node.address(node.name) for node in nodes]
            asyncio.get_running_loop().call_later(0.05, fleet.reload, everybody[:1])
            asyncio.get_running_loop().call_later(0.1, fleet.reload, everybody)
            told = await reader(fleet, kit.request(1, 100))
            assert told.end is not None
            await until(lambda: all(s.is_up and not s.is_draining for s in fleet.health().nodes))
            assert len(fleet.health().nodes) == 2

    run(scenario())


def test_a_node_with_another_address_is_dialled_there(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            old, new = kit.node("a"), kit.node("a")
            await new.start(group)
            async with kit.fleet(old) as fleet:
                moved = NodeAddress("127.0.0.1", new.port, "a")
                assert fleet.reload((moved,)).moved == ("a",)
                assert (await reader(fleet, kit.request(1))).end is not None
                assert (len(old.opens), len(new.opens)) == (0, 1)
            await new.die()

    run(scenario())


def test_a_node_that_comes_back_gets_its_lanes_little_by_little(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name, lanes=16, step_s=0.02) for name in "ab"}
        async with asyncio.TaskGroup() as group:
            limits = FleetLimits(warm_up_ms=2_000)
            async with kit.fleet(*nodes.values(), fleet_limits=limits) as fleet:
                await asyncio.sleep(2.1)
                await reader(fleet, kit.request(0, 1))
                await nodes["a"].die()
                await nodes["a"].start(group)
                await until(lambda: all(state.is_up for state in fleet.health().nodes))
                before = len(nodes["a"].opens)
                tasks = [group.create_task(reader(fleet, kit.request(n, 20))) for n in range(1, 17)]
                await asyncio.sleep(0.1)
                assert 1 <= len(nodes["a"].opens) - before <= 4
                await asyncio.gather(*tasks)

    run(scenario())


def test_four_equal_nodes_that_have_just_joined_share_a_burst_at_once(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        nodes = [kit.node(name, lanes=8) for name in "abcd"]
        async with kit.fleet(*nodes) as fleet:
            await asyncio.gather(*(reader(fleet, kit.request(n, 4)) for n in range(32)))
            shares = Counter({node.name: len(node.opens) for node in nodes})
            assert max(shares.values()) <= 9

    run(scenario())


# --- warm prefixes ------------------------------------------------------------------------------------


def test_a_request_goes_where_its_beginning_is_cached(kit: Any, reader: Any) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name) for name in "abcd"}
        async with kit.fleet(*nodes.values()) as fleet:
            prompt = tuple(range(100, 100 + 3_000))
            root = root_hash(kit.keys.prefix_salt, tenant="acme")
            names = tuple(block_chain(root, prompt, 16))
            (link,) = nodes["c"]._listener.links
            link.send(Prefix(1, 0, 1, True, names[:150], ()))
            await asyncio.sleep(0.1)
            for number in range(8):
                request = replace(kit.request(number, 2), prompt=prompt, tenant="acme")
                await reader(fleet, request)
            assert len(nodes["c"].opens) == 8
            (record,) = fleet.why("req-3")
            assert "2400 cached" in record.scores[0]
            for number in range(8):
                request = replace(kit.request(number, 2), prompt=prompt, tenant="other")
                await reader(fleet, request)
            assert len(nodes["c"].opens) < 16, "another tenant shares nothing"
            link.send(Prefix(3, 0, 1, False, (), ()))
            await asyncio.sleep(0.1)
            for number in range(8):
                request = replace(kit.request(number, 2), prompt=prompt, tenant="acme")
                await reader(fleet, request)
            assert any("cached" not in r.scores[0] for r in fleet.why("req-7")[-1:])

    run(scenario())


def test_naming_a_long_prompt_does_not_hold_up_the_loop(kit: Any, reader: Any) -> None:
    async def scenario() -> float:
        node = kit.node("a", window=200_000)
        async with kit.fleet(node) as fleet:
            (link,) = node._listener.links
            link.send(Prefix(1, 0, 1, True, (bytes(16),), ()))
            await asyncio.sleep(0.05)
            longest = 0.0
            request = replace(kit.request(1, 2), prompt=tuple(range(900)) * 150)
            task = asyncio.ensure_future(reader(fleet, request))
            while not task.done():
                began = time.perf_counter()
                await asyncio.sleep(0)
                longest = max(longest, time.perf_counter() - began)
            await task
            return longest

    print(
        f"longest turn of the loop with a prompt of 135,000 tokens: {1e3 * run(scenario()):.1f} ms"
    )


# --- what is told -------------------------------------------------------------------------------------


def test_events_tell_of_nodes_placements_moves_and_drains_without_gaps(
    kit: Any, reader: Any
) -> None:
    async def scenario() -> None:
        nodes = {name: kit.node(name) for name in "ab"}
        async with kit.fleet(*nodes.values()) as fleet:
            with fleet.events(since=0) as listener:

                async def kill(count: Any) -> None:
                    if count == 4:
                        await next(node for node in nodes.values() if node.running).die()

                told = await reader(fleet, kit.request(1, 30), kill)
                assert any(isinstance(event, MovedEvent) for event in told.others)
                fleet.drain("a", 1_000)
                seen = []
                async for event in listener:
                    seen.append(event)
                    if event.kind == "drain":
                        break
            kinds = Counter(event.kind for event in seen)
            assert kinds["node-up"] == 2
            assert kinds["node-down"] == kinds["moved"] == 1
            assert kinds["placed"] == 2
            assert [event.sequence for event in seen] == list(range(1, len(seen) + 1))
            moved = next(event for event in seen if event.kind == "moved")
            assert moved.fields["request"] == "req-1"
            assert moved.fields["reason"] == "link cut"

    run(scenario())


def test_a_listener_that_does_not_read_is_told_how_much_it_missed(kit: Any) -> None:
    async def scenario() -> None:
        async with kit.fleet(kit.node("a")) as fleet:
            with fleet.events() as slow:
                for number in range(EVENTS_KEPT_MAX + 7):
                    fleet._runner.chronicle.tell("test", number=number)
                first = await anext(slow)
                assert (first.kind, first.fields["events"]) == ("missed", 7)
                assert (await anext(slow)).fields["number"] == 7

    run(scenario())


def test_listeners_are_bounded_and_leave_no_trace(kit: Any) -> None:
    async def scenario() -> None:
        from contextlib import ExitStack

        async with kit.fleet(kit.node("a")) as fleet:
            with ExitStack() as stack:
                for _ in range(LISTENERS_MAX):
                    stack.enter_context(fleet.events())
                with pytest.raises(CapacityError), fleet.events():
                    pass
            with fleet.events():
                pass

    run(scenario())


def test_an_unknown_node_cannot_be_drained(kit: Any) -> None:
    from superfluid_core.errors import InvalidRequestError

    async def scenario() -> None:
        async with kit.fleet(kit.node("a")) as fleet:
            with pytest.raises(InvalidRequestError):
                fleet.drain("nobody")

    run(scenario())
