"""Several links to one node: worn ones replaced under load, sessions spread, one lost, nodes that dial in."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

import superfluid_head.fleet.node as node_module
from superfluid_core.clock import SystemClock
from superfluid_core.limits import LinkLimits
from superfluid_core.session import SamplingParams
from superfluid_head.fleet.events import EndEvent, GenerationRequest, MovedEvent, TokensEvent
from superfluid_head.fleet.fleet import Fleet, FleetOptions, NodeAddress
from superfluid_head.fleet.node import FleetNode
from tests.unit.noded.conftest import KEYS, NodeRig, serving

WORN = LinkLimits(rekey_bytes=1024 * 1024, rekey_grace_ms=20, new_burst_per_address=200,
                  dial_backoff_ms_max=200, dial_backoff_ms_min=5)  # fmt: skip


def request(number: int, tokens: int, prompt: int = 40) -> GenerationRequest:
    ids = tuple((number * 131 + index * 7) % 900 + 30 for index in range(prompt))
    return GenerationRequest(f"r{number}", "m", ids, SamplingParams(seed=number), tokens)


async def read(fleet: Fleet, asked: GenerationRequest, told: list[object]) -> list[int]:
    """Read to the end; indexes have no gap, moves and the end are noted in `told`."""
    ids: list[int] = []
    async with fleet.generate(asked) as generation:
        async for event in generation:
            if isinstance(event, TokensEvent):
                assert event.first == len(ids)
                ids.extend(event.ids)
            elif isinstance(event, MovedEvent | EndEvent):
                told.append(event)
    return ids


async def until(claim: Any, seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not claim():  # noqa: ASYNC110 # polls what has no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def fleet_of(*nodes: NodeRig, head: str = "head-1", **options: Any) -> AsyncIterator[Fleet]:
    addresses = tuple(NodeAddress("127.0.0.1", rig.port, f"box-{n}") for n, rig in enumerate(nodes))
    fleet = Fleet(FleetOptions(addresses, head, KEYS, **options), SystemClock(), random.Random(3))
    await fleet.listen()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(fleet.run())
        try:
            if nodes:
                assert await fleet.wait_ready(10.0)
            yield fleet
        finally:
            running.cancel()
            await asyncio.wait({running})


async def unbroken(asked: list[GenerationRequest], **options: Any) -> list[list[int]]:
    """What a node says that nothing happens to."""
    async with serving(**options) as rig, fleet_of(rig) as fleet:
        return await asyncio.gather(*(read(fleet, each, []) for each in asked))


def node_in(fleet: Fleet, number: int = 0) -> FleetNode:
    return list(fleet._nodes.values())[number]


# --- worn links -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_fifty_links_are_replaced_at_one_mebibyte_without_a_lost_or_repeated_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T-H26. A file of a mebibyte wears each link out; sessions and questions go on through all of them."""
    monkeypatch.setattr(node_module, "PERIOD_MS", 20)
    engine: dict[str, Any] = {"lanes": 4, "blocks": 2_048, "step_tokens": 256}
    file = random.Random(1).randbytes(1024 * 1024)

    async def main() -> None:
        told: list[object] = []
        got: dict[int, list[int]] = {}
        async with (
            serving(files={"tokenizer.json": file}, decode_rate=600.0, **engine) as rig,
            fleet_of(rig, link_limits=WORN) as fleet,
        ):
            node = node_in(fleet)

            async def ask(reader: int) -> None:
                for turn in range(1_000):
                    if node.rekeys >= 50:
                        return
                    number = 1 + reader + 10 * turn
                    got[number] = await read(fleet, request(number, 300), told)

            readers = [asyncio.create_task(ask(reader)) for reader in range(4)]
            while node.rekeys < 50:
                assert await fleet.fetch_file("m", "tokenizer.json") == file
            await asyncio.gather(*readers)
            assert [event for event in told if isinstance(event, MovedEvent)] == []
            assert len(told) == len(got)
            assert fleet.counters.relinked >= 50
            assert fleet.counters.rekeys >= 50
            await until(lambda: len(node.links) == 1)
            await until(lambda: len(rig.node.agent.roster.heads) == 1)
        expected = await unbroken([request(number, 300) for number in got], **engine)
        assert list(got.values()) == expected

    asyncio.run(main())


# --- several links --------------------------------------------------------------------------------


def test_sessions_spread_over_the_links_and_the_loss_of_one_moves_only_its_own() -> None:
    asked = [request(number, 300) for number in range(1, 7)]

    async def main() -> None:
        expected = await unbroken(asked, lanes=6)
        told: list[list[object]] = [[] for _ in asked]
        async with (
            serving(lanes=6, decode_rate=900.0) as rig,
            fleet_of(rig, conns=3) as fleet,
        ):
            node = node_in(fleet)
            await until(lambda: len(node.links.fresh) == 3)
            readers = [
                asyncio.create_task(read(fleet, each, heard))
                for each, heard in zip(asked, told, strict=True)
            ]
            await until(
                lambda: len(node.slots) == 6 and all(s.is_begun for s in node.slots.values())
            )
            links = [slot.link for slot in node.slots.values()]
            assert sorted(links.count(number) for number in set(links)) == [2, 2, 2]
            victim = next(each for each in node.links if each is not node.standing)
            victim.link.abort("cut")
            got = await asyncio.gather(*readers)
            moved = [any(isinstance(event, MovedEvent) for event in heard) for heard in told]
            assert sum(moved) == 2
            assert got == expected
            assert fleet.counters.faults == 0
            await until(lambda: len(node.links.fresh) == 3)

    asyncio.run(main())


def test_the_loss_of_the_first_link_leaves_the_node_up_and_its_reports_begin_anew() -> None:
    async def main() -> None:
        async with serving() as rig, fleet_of(rig, conns=2) as fleet:
            rig.node.prefixes.report()
            node = node_in(fleet)
            await until(lambda: len(node.links.fresh) == 2)
            first = node.standing
            assert first is not None
            assert first.is_warm
            first.link.abort("cut")
            await until(lambda: node.standing is not first)
            assert node.view.is_up
            await until(lambda: len(node.links.fresh) == 2 and node.links.is_warm)
            assert await read(fleet, request(5, 20), [])

    asyncio.run(main())


def test_a_process_that_dies_with_all_its_links_costs_one_failure() -> None:
    async def main() -> None:
        told: list[object] = []
        async with (
            serving(decode_rate=200.0) as one,
            serving(decode_rate=200.0, flags={"identity": "node-2"}) as other,
            fleet_of(one, other, conns=2) as fleet,
        ):
            nodes = list(fleet._nodes.values())
            await until(lambda: all(len(node.links.fresh) == 2 for node in nodes))
            reader = asyncio.create_task(read(fleet, request(3, 100), told))
            await until(lambda: any(s.is_begun for node in nodes for s in node.slots.values()))
            (node,) = [node for node in nodes if node.slots]
            rig = one if node.address.port == one.port else other
            for head in list(rig.node.agent.roster.heads.values()):
                head.link.abort("killed")
            ids = await reader
            assert len([event for event in told if isinstance(event, MovedEvent)]) == 1
            assert fleet.counters.faults == 1
        assert len(ids) == 100

    asyncio.run(main())


# --- nodes that dial in ---------------------------------------------------------------------------


@asynccontextmanager
async def joining(port: int, **options: Any) -> AsyncIterator[NodeRig]:
    """A node that dials a head on loopback; the same one each time, unless it is told otherwise."""
    flags = {"join": (f"127.0.0.1:{port}",), "identity": "joining"} | options.pop("flags", {})
    async with serving(flags=flags, **options) as rig, asyncio.TaskGroup() as group:
        running = group.create_task(rig.node.joiner.run())
        try:
            yield rig
        finally:
            await rig.node.joiner.close("the node stops")
            running.cancel()


@asynccontextmanager
async def listening(port: int = 0, **options: Any) -> AsyncIterator[tuple[Fleet, int]]:
    """A head that nodes dial."""
    fleet = Fleet(
        FleetOptions((), "head-1", KEYS, listen=(("127.0.0.1", port),), **options),
        SystemClock(),
        random.Random(3),
    )
    ((_, bound),) = await fleet.listen()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(fleet.run())
        try:
            yield fleet, bound
        finally:
            running.cancel()
            await asyncio.wait({running})


def test_a_node_that_dials_in_serves_and_comes_back_after_a_restart_of_the_head() -> None:
    async def main() -> None:
        expected = await unbroken([request(1, 40)])
        async with AsyncExitStack() as stack:
            async with listening() as (fleet, port):
                rig = await stack.enter_async_context(joining(port))
                assert await fleet.wait_ready(5)
                assert await read(fleet, request(1, 40), []) == expected[0]
                (state,) = fleet.health().nodes
                assert (state.name, state.link, state.links) == ("joining", "joined", 1)
                assert state.address == "127.0.0.1"
                assert fleet.counters.joins == 1
            async with listening(port) as (fleet, _):
                assert await fleet.wait_ready(10)
                assert await read(fleet, request(1, 40), []) == expected[0]
            assert rig.node.joiner.joins == 2

    asyncio.run(main())


def test_a_joined_node_works_beside_a_dialled_one_and_a_reload_leaves_it_alone() -> None:
    async def main() -> None:
        async with serving(flags={"identity": "dialled"}) as one:
            address = NodeAddress("127.0.0.1", one.port, "box-0")
            options = FleetOptions((address,), "head-1", KEYS, listen=(("127.0.0.1", 0),))
            fleet = Fleet(options, SystemClock(), random.Random(3))
            ((_, port),) = await fleet.listen()
            async with asyncio.TaskGroup() as group:
                running = group.create_task(fleet.run())
                async with joining(port):
                    await until(lambda: [n.is_up for n in fleet.health().nodes] == [True, True])
                    assert fleet.reload(()).removed == ("box-0",)
                    await until(lambda: [n.name for n in fleet.health().nodes] == ["joining"])
                    assert await read(fleet, request(1, 10), [])
                running.cancel()

    asyncio.run(main())


def test_an_identity_that_is_live_is_refused_by_name_on_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    def logged(words: str) -> bool:
        return any(
            words in record.getMessage()
            or words in str(getattr(record, "superfluid_fields", {}).get("cause"))
            for record in caplog.records
        )

    async def main() -> None:
        async with listening() as (fleet, port), joining(port):
            assert await fleet.wait_ready(5)
            async with joining(port) as second:
                words = "it calls itself 'joining', which is live as another process"
                await until(lambda: fleet.counters.join_refusals > 0)
                await until(lambda: logged(words))
                await until(lambda: logged(f"unauthorized: refused: {words}"))
                assert second.node.joiner.refusals > 0
                assert [node.is_up for node in fleet.health().nodes] == [True]

    asyncio.run(main())


def test_a_joined_nodes_links_are_as_many_as_the_head_wants_and_are_replaced_when_worn() -> None:
    file = random.Random(1).randbytes(600 * 1024)

    async def main() -> None:
        told: list[object] = []
        expected = await unbroken([request(7, 300)])
        async with listening(conns=2, link_limits=WORN) as (fleet, port):
            files = {"tokenizer.json": file}
            async with joining(port, files=files, decode_rate=200.0):
                assert await fleet.wait_ready(5)
                node = node_in(fleet)
                await until(lambda: len(node.links.fresh) == 2)
                reader = asyncio.create_task(read(fleet, request(7, 300), told))
                while node.rekeys < 2:
                    assert await fleet.fetch_file("m", "tokenizer.json") == file
                assert await reader == expected[0]
                await until(lambda: len(node.links) == 2)
        assert len(told) == 1

    asyncio.run(main())


def test_a_node_that_has_left_is_forgotten_after_a_while() -> None:
    async def main() -> None:
        limits = LinkLimits(joined_forget_ms=200)
        async with listening(link_limits=limits) as (fleet, port):
            async with joining(port):
                assert await fleet.wait_ready(5)
            await until(lambda: [n.state for n in fleet.health().nodes] == ["down"])
            await until(lambda: list(fleet.health().nodes) == [])

    asyncio.run(main())


def test_names_are_resolved_at_every_dial_in_both_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name leads nowhere at first; the next dial finds where it has moved to."""
    asked: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        resolve = loop.getaddrinfo

        async def moving(host: str, port: int, **flags: Any) -> Any:
            if not host.endswith(".test"):
                return await resolve(host, port, **flags)
            asked.append(host)
            is_first = asked.count(host) == 1
            return await resolve("127.0.0.9" if is_first else "127.0.0.1", port, **flags)

        monkeypatch.setattr(loop, "getaddrinfo", moving)
        async with serving(flags={"identity": "dialled"}) as one:
            address = NodeAddress("node.test", one.port)
            options = FleetOptions((address,), "head-1", KEYS, listen=(("127.0.0.1", 0),))
            fleet = Fleet(options, SystemClock(), random.Random(3))
            ((_, port),) = await fleet.listen()
            async with asyncio.TaskGroup() as group:
                running = group.create_task(fleet.run())
                flags = {"join": (f"head.test:{port}",), "insecure_no_auth": True}
                async with joining(port, flags=flags):
                    await until(lambda: [n.is_up for n in fleet.health().nodes] == [True, True])
                running.cancel()

    asyncio.run(main())
    assert asked.count("node.test") == 2
    assert asked.count("head.test") == 2
