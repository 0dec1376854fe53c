"""A key is rotated under load: `new` and `old` on host after host, then `new` alone (T-H15)."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.link.keys import keys_from_secrets
from superfluid_core.session import SamplingParams
from superfluid_head.fleet.events import EndEvent, GenerationRequest, TokensEvent
from superfluid_head.fleet.fleet import Fleet, FleetOptions, NodeAddress
from tests.unit.noded.conftest import NodeRig, serving

OLD, NEW = b"o" * 32, b"n" * 32
STEPS = (("node", 0, (NEW, OLD)), ("node", 1, (NEW, OLD)), ("head", 0, (NEW, OLD)),
         ("node", 0, (NEW,)), ("node", 1, (NEW,)), ("head", 0, (NEW,)))  # fmt: skip


class Rollout:
    """Two nodes and a head, each restarted with other keys while answers are read."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group = group
        self.hosts: list[AsyncExitStack] = [AsyncExitStack(), AsyncExitStack()]
        self.rigs: list[NodeRig | None] = [None, None]
        self.fleet: Fleet | None = None
        self.running: asyncio.Task[None] | None = None
        self.answers: list[tuple[int, list[int], bool]] = []

    def addresses(self) -> tuple[NodeAddress, ...]:
        return tuple(
            NodeAddress("127.0.0.1", rig.port, f"box-{number}")
            for number, rig in enumerate(self.rigs)
            if rig is not None
        )

    async def node(self, number: int, secrets: tuple[bytes, ...]) -> None:
        """Start the host's node anew, elsewhere; the head is told, then the old one ends."""
        fresh = AsyncExitStack()
        self.rigs[number] = await fresh.enter_async_context(
            serving(
                keys=keys_from_secrets(secrets),
                flags={"identity": f"box-{number}"},
                decode_rate=400.0,
            )
        )
        before, self.hosts[number] = self.hosts[number], fresh
        if self.fleet is not None:
            self.fleet.reload(self.addresses())
            await asyncio.sleep(0.1)
        await before.aclose()

    async def head(self, secrets: tuple[bytes, ...]) -> None:
        """Start another head; the one before goes when its answers are read."""
        options = FleetOptions(self.addresses(), "head-1", keys_from_secrets(secrets))
        fleet = Fleet(options, SystemClock(), random.Random(1))
        running = self.group.create_task(fleet.run())
        assert await fleet.wait_ready(10)
        self.fleet, self.running = fleet, running

    async def read(self, fleet: Fleet, number: int) -> None:
        request = GenerationRequest(
            f"r{number}", "m", (40, 50 + number), SamplingParams(seed=number), 80
        )
        ids: list[int] = []
        ended = False
        async with fleet.generate(request) as generation:
            async for event in generation:
                if isinstance(event, TokensEvent):
                    assert event.first == len(ids)
                    ids.extend(event.ids)
                ended = ended or isinstance(event, EndEvent)
        self.answers.append((number, ids, ended))

    def stream(self, first: int) -> list[asyncio.Task[None]]:
        assert self.fleet is not None
        return [
            self.group.create_task(self.read(self.fleet, first + number)) for number in range(3)
        ]

    async def step(self, number: int, kind: str, host: int, secrets: tuple[bytes, ...]) -> None:
        before, readers = self.running, self.stream(10 * number)
        await asyncio.sleep(0.05)
        await (self.node(host, secrets) if kind == "node" else self.head(secrets))
        await asyncio.gather(*readers)
        if kind == "head" and before is not None:
            before.cancel()
        await asyncio.gather(*self.stream(10 * number + 5))


@pytest.mark.slow
def test_a_key_is_rotated_with_live_answers_and_none_fails() -> None:
    async def main() -> list[tuple[int, list[int], bool]]:
        async with asyncio.TaskGroup() as group:
            rollout = Rollout(group)
            for number in range(2):
                await rollout.node(number, (OLD,))
            await rollout.head((OLD,))
            for number, (kind, host, secrets) in enumerate(STEPS, 1):
                await rollout.step(number, kind, host, secrets)
            if rollout.running is not None:
                rollout.running.cancel()
                await asyncio.wait({rollout.running})
            for stack in rollout.hosts:
                await stack.aclose()
            return rollout.answers

    async def oracle(asked: list[int]) -> dict[int, list[int]]:
        async with asyncio.TaskGroup() as group:
            rollout = Rollout(group)
            await rollout.node(0, (OLD,))
            await rollout.head((OLD,))
            fleet: Any = rollout.fleet
            await asyncio.gather(*(rollout.read(fleet, number) for number in asked))
            assert rollout.running is not None
            rollout.running.cancel()
            await asyncio.wait({rollout.running})
            await rollout.hosts[0].aclose()
            return {number: ids for number, ids, _ in rollout.answers}

    answers = asyncio.run(main())
    assert len(answers) == 6 * len(STEPS)
    assert all(ended and len(ids) == 80 for _, ids, ended in answers)
    assert {number: ids for number, ids, _ in answers} == asyncio.run(
        oracle([number for number, _, _ in answers])
    )
