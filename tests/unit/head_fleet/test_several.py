"""Several models in one fleet, several engines on one node, several heads on one node: what is whose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.blockhash import block_chain, root_hash
from superfluid_core.clock import MS, SECOND, SystemClock
from superfluid_core.errors import CapacityError, ErrorCode, InvalidRequestError
from superfluid_core.limits import FleetLimits
from superfluid_core.placement.view import Load
from superfluid_core.session import Determinism, SamplingParams
from superfluid_core.wire.messages import EngineLoad, ModelOffer, Prefix, Status, Welcome
from superfluid_head.fleet.directory import Admission, Directory
from superfluid_head.fleet.events import EndEvent, GenerationRequest
from superfluid_head.fleet.fleet import Fleet, FleetOptions
from superfluid_head.fleet.journal import Journal
from superfluid_head.fleet.translate import LEFT_MS_MAX, loads_of, open_of, with_deadlines
from superfluid_head.fleet.warmth import ContextNames, Warmth


def asked(model: str, number: int = 1, **settings: Any) -> GenerationRequest:
    return GenerationRequest(
        f"r{number}", model, (1, 5, number), SamplingParams(seed=number), 4, **settings
    )


async def run(fleet: Fleet, request: GenerationRequest) -> str | None:
    """Run to the end; returns where."""
    async with fleet.generate(request) as generation:
        async for event in generation:
            if isinstance(event, EndEvent):
                return generation.last_node
    return None


async def until(claim: Callable[[], Any], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not claim():  # noqa: ASYNC110 - looks into nodes, which set no event for tests
            await asyncio.sleep(0.01)


# --- models of a fleet ----------------------------------------------------------------------------


def test_requests_go_to_nodes_that_serve_their_model_and_all_models_are_listed(kit: Any) -> None:
    async def body() -> None:
        nodes = [kit.node("a"), kit.node("b", models=("n",)), kit.node("c", models=("m", "n", "o"))]
        async with kit.fleet(*nodes) as fleet:
            await until(lambda: all(node.is_up for node in fleet.health().nodes))
            listed = {model.name: set(model.nodes) for model in fleet.models()}
            assert listed == {"m": {"a", "c"}, "n": {"b", "c"}, "o": {"c"}}
            homes: dict[str, set[str | None]] = {"m": set(), "n": set(), "o": set()}
            for number in range(12):
                # one model after the other: in turns, "c" would be left to the model that it alone serves
                model = "mno"[number // 4]
                homes[model].add(await run(fleet, asked(model, number)))
            assert homes == listed
            for node in nodes:
                assert {message.model for message in node.opens} <= set(node.models)

    asyncio.run(body())


def test_a_model_whose_nodes_are_gone_stays_listed_and_is_refused_and_others_are_served(
    kit: Any,
) -> None:
    async def body() -> None:
        nodes = [kit.node("a"), kit.node("b", models=("n",))]
        limits = FleetLimits(no_node_wait_ms=200)
        async with kit.fleet(*nodes, fleet_limits=limits) as fleet:
            await until(lambda: all(node.is_up for node in fleet.health().nodes))
            await nodes[1].die()
            await until(lambda: not {m.name: m.is_up for m in fleet.models()}["n"])
            assert [model.name for model in fleet.models()] == ["m", "n"]
            with pytest.raises(CapacityError) as refused:
                await run(fleet, asked("n"))
            assert refused.value.code is ErrorCode.NO_WORKER
            assert refused.value.retry_after_ms
            assert await run(fleet, asked("m")) == "a"
            with pytest.raises(InvalidRequestError) as unknown:
                fleet.generate(asked("other"))
            assert unknown.value.code is ErrorCode.MODEL_NOT_FOUND
            assert fleet.health().is_ready

    asyncio.run(body())


# --- engines of a node ----------------------------------------------------------------------------

OFFER = ModelOffer("m", "w", "t", "f32", "b", 1_000, (2,), 4_096, 8, 16, 1_000)
FIM = replace(OFFER, name="fim", weights="f", lanes=2, blocks=64, engine=1)
WELCOME = Welcome(
    0, ("prefix-shared",), "box", "b1", (OFFER, replace(OFFER, name="alias"), FIM), 1,
    Determinism.EXACT, 20, 30_000, 120_000,
)  # fmt: skip
STATUS = Status(
    1, 9, 9, 10, (0, 0, 5, 1), 700, 90, 10, 1_000, 2_000.0, ((1, 40.0),), 10, False,
    (
        EngineLoad(8, 8, 6, 690, 90, 10, 1_000, 2_000.0, ((1, 40.0),)),
        EngineLoad(1, 2, 0, 10, 3, 1, 64, 9_000.0, ((2, 300.0),)),
    ),
)  # fmt: skip


def test_a_report_gives_each_engine_its_own_load_and_a_lone_one_the_whole() -> None:
    main, others = loads_of(STATUS)
    assert main == Load(8, 6, 690, 90, 1_000, 2_000.0, ((1, 40.0),))
    assert others == {1: Load(1, 0, 10, 3, 64, 9_000.0, ((2, 300.0),))}
    assert loads_of(replace(STATUS, engines=())) == (
        Load(9, 6, 700, 90, 1_000, 2_000.0, ((1, 40.0),)),
        {},
    )


def test_offers_keep_the_number_of_their_engine() -> None:
    admission: Admission = Directory().admit("k", "box", WELCOME)
    engines = {name: offer.engine for name, offer in admission.views().items()}
    assert engines == {"m": 0, "alias": 0, "fim": 1}


def test_each_engine_s_cache_warms_its_own_model_only() -> None:
    warmth = Warmth(b"salt")
    prompt = tuple(range(64))
    warmth.attach("k", WELCOME, {offer.name: offer for offer in WELCOME.models})
    chain = tuple(block_chain(root_hash(b"salt", tenant=""), prompt, 16))
    warmth.take("k", Prefix(1, 0, 1, True, chain[:3], (), 1))
    warmth.take("k", Prefix(1, 0, 1, True, chain[:1], ()))
    warmth.take("k", Prefix(1, 0, 1, True, chain, (), 5))

    def cached(model: str) -> dict[str, int]:
        request = replace(asked(model), prompt=prompt)
        return dict(warmth.cached(request, (), ContextNames()))

    assert (cached("fim"), cached("m"), cached("alias")) == ({"k": 48}, {"k": 16}, {"k": 16})
    warmth.take("k", Prefix(2, 0, 1, False, (), chain[:1]))
    assert (cached("fim"), cached("m")) == ({"k": 48}, {})
    warmth.detach("k")
    assert (cached("fim"), warmth.blocks) == ({}, 0)


# --- deadlines on the wire ------------------------------------------------------------------------


def test_the_node_is_told_how_long_a_completion_may_wait_for_its_start(kit: Any) -> None:
    async def body() -> None:
        a = kit.node("a")
        async with kit.fleet(a) as fleet:
            await until(lambda: fleet.health().is_ready)
            soon_ns = SystemClock().now_ns() + 5 * SECOND
            await run(fleet, asked("m", 1, start_by_ns=soon_ns))
            await run(fleet, asked("m", 2))
            first, second = a.opens
            assert first.start_deadline_ms is not None
            assert 1_000 < first.start_deadline_ms <= 5_000
            assert (first.deadline_ms, second.start_deadline_ms) == (None, None)

    asyncio.run(body())


def test_what_is_left_is_at_least_a_millisecond_and_no_more_than_the_wire_can_say() -> None:
    def left(request: GenerationRequest, *, has_started: bool = False) -> tuple[Any, Any]:
        journal = Journal(request)
        journal.has_started = has_started
        slot: Any = _Slot()
        message = open_of(journal, slot, request.qos, 4, (0, 1_000))
        message = with_deadlines(message, journal, 10 * MS)
        return message.deadline_ms, message.start_deadline_ms

    late = replace(asked("m"), start_by_ns=9 * MS, deadline_ns=40 * MS)
    assert left(late) == (30, 1)
    assert left(late, has_started=True) == (30, None)
    assert left(replace(late, start_by_ns=1 << 62)) == (30, LEFT_MS_MAX)


class _Slot:
    """What an OPEN takes of a slot."""

    session, epoch = 1, 1


# --- heads of a node ------------------------------------------------------------------------------


def test_a_drain_reaches_the_node_and_other_heads_see_it_and_may_end_it(kit: Any) -> None:
    async def body() -> None:
        a, b = kit.node("a"), kit.node("b")
        async with kit.fleet(a, b) as first:
            addresses = tuple(node.address(node.name) for node in (a, b))
            second = Fleet(FleetOptions(addresses, "head-2", kit.keys), SystemClock())
            running = asyncio.create_task(second.run())

            def seen(fleet: Fleet) -> list[bool]:
                return [node.is_draining for node in fleet.health().nodes]

            await until(lambda: first.health().is_ready and second.health().is_ready)
            await until(lambda: all(n.is_up for f in (first, second) for n in f.health().nodes))
            first.drain("a", 60_000)
            await until(lambda: seen(second) == [True, False])
            assert a.orders[-1] >= 3_600_000, (
                "what runs there is moved by heads, not ended by the node"
            )
            assert {await run(second, asked("m", number)) for number in range(6)} == {"b"}
            await a.cut()
            await until(lambda: len(a.orders) == 2 and seen(first) == [True, False])
            second.undrain("a")
            await until(lambda: seen(second) == [False, False])
            assert seen(first) == [True, False], "this head's own will stands"
            first.undrain("a")
            await until(lambda: seen(first) == [False, False])
            assert a.orders[-1] is None
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(body())


def test_a_node_that_is_back_keeps_what_runs_there(kit: Any) -> None:
    """Another head drained it and took that back before this head's patience ended."""

    async def body() -> None:
        a, b = kit.node("a", step_s=0.02), kit.node("b")
        limits = FleetLimits(drain_grace_ms=1_500)
        async with kit.fleet(a, b, fleet_limits=limits) as fleet:
            await until(lambda: all(node.is_up for node in fleet.health().nodes))
            fleet.drain("b", 60_000)
            request = replace(asked("m"), max_output=60)
            async with fleet.generate(request) as generation:
                task = asyncio.create_task(_events(generation))
                await until(lambda: a.running)
                fleet.undrain("b")
                a.orders.append(86_400_000)
                await until(lambda: fleet.health().nodes[0].is_draining)
                a.orders.append(None)
                end = await task
            assert (end.moves, generation.last_node) == (0, "a")

    asyncio.run(body())


async def _events(generation: Any) -> Any:
    last = None
    async for event in generation:
        last = event
    return last
