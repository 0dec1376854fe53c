"""Scenarios of what lies between head and node: C2 frozen nodes, C3 black holes, C4 cut links, C5 flipped bits."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

from superfluid_core.limits import LinkLimits
from superfluid_head.bench.prose import Draws
from tests.chaos.crowd import Load, Run, running, until
from tests.chaos.frames import FrameCounter
from tests.chaos.on_nodes import opened
from tests.chaos.proxy import End, Way
from tests.chaos.scenario import GAP_FROZEN_MS_MAX, GAP_KILLED_MS_MAX, Row, Scale
from tests.chaos.site import MOCK, Setup, Site, rates

DECODE = 15
LEASE_S = LinkLimits().lease_ttl_ms / 1000
DEAD_S_MAX = 5.0
HOLE_S = 6.0
WAKE_S = 1.5
SHORT_FREEZES = (5, 1, 5, 5, 1, 5, 5, 1, 5, 1)
LONG_FREEZES = (15, 1, 5, 1, 15, 1, 15, 1, 5)
LONGEST_FREEZE = 60


# --- C2 -------------------------------------------------------------------------------------------


async def freeze(run: Run, name: str, seconds: float) -> None:
    """SIGSTOP a node for a while; then let the answers of that moment end and the node come back."""
    run.fault(f"freeze {seconds:.0f} s", name)
    node = run.site.node(name)
    node.freeze()
    await asyncio.sleep(seconds)
    node.thaw()
    await run.outlive()
    await run.until_up(run.site.setup.nodes)


async def short_freezes(scale: Scale, row: Row, seconds: Sequence[int]) -> None:
    async with AsyncExitStack() as stack:
        site = await opened(stack, Setup(nodes=5, flags=(*MOCK, *rates(DECODE))))
        draws, load = Draws(scale.seed), Load(scale.crowd(8), seed=scale.seed)
        async with running(site, load) as run:
            for length in seconds:
                await run.until_streaming(max(1, load.clients // 2))
                await freeze(run, await run.victim(draws), length)
        row.add(run.history)


async def long_freezes(scale: Scale, row: Row, seconds: Sequence[int]) -> None:
    """Freezes beyond the lease, on links without a key so that frames can be counted; one node sleeps all the while."""
    setup = Setup(nodes=4, flags=(*MOCK, *rates(DECODE)), has_key=False)
    taps = {f"node-{n}": FrameCounter() for n in range(setup.nodes)}
    async with AsyncExitStack() as stack:
        site = await opened(stack, Setup(nodes=4, flags=setup.flags, has_key=False, taps=taps))
        load = Load(scale.crowd(8), seed=scale.seed + 1)
        async with running(site, load) as run, asyncio.TaskGroup() as group:
            await run.until_streaming(load.clients)
            group.create_task(sleep_long(run, site.names[0], row, taps))
            for number, length in enumerate(seconds):
                await run.until_streaming(max(1, load.clients // 2))
                name = site.names[1 + number % 3]
                if length <= 1:
                    await freeze_briefly(run, name, length)
                    continue
                said = await freeze_unseen(run, name, length, taps[name])
                judge_wake(row, name, length, said)
        row.add(run.history)


async def sleep_long(run: Run, name: str, row: Row, taps: dict[str, FrameCounter]) -> None:
    said = await freeze_unseen(run, name, LONGEST_FREEZE, taps[name])
    judge_wake(row, name, LONGEST_FREEZE, said)


async def freeze_briefly(run: Run, name: str, seconds: float) -> None:
    run.fault(f"freeze {seconds:.0f} s", name)
    run.site.node(name).freeze()
    await asyncio.sleep(seconds)
    run.site.node(name).thaw()
    await run.outlive()


async def freeze_unseen(run: Run, name: str, seconds: float, tap: FrameCounter) -> int:
    """As `freeze`, behind a dead cable, so that the node wakes on a link that it believes in; returns its TOKENS frames then."""
    run.fault(f"freeze {seconds:.0f} s unseen", name)
    node, proxy = run.site.node(name), run.site.proxies[name]
    node.freeze()
    await asyncio.sleep(0.1)  # what it sent before is through
    proxy.hold()
    newest = tap.newest
    await asyncio.sleep(seconds)
    node.thaw()
    await asyncio.sleep(WAKE_S)
    released_ms = run.now_ms()
    proxy.release()
    await asyncio.sleep(0.3)
    said = tap.since(released_ms, newest)
    await run.until_node(name, lambda node: bool(node["is_up"]))
    await run.outlive()
    return said


def judge_wake(row: Row, name: str, seconds: float, said: int) -> None:
    """Beyond its lease a woken node says nothing; within it, it may, and nobody hears it."""
    if seconds > LEASE_S:
        row.check(said == 0, f"{name} woke after {seconds} s: {said} TOKENS frames")
    else:
        row.notes.append(f"{name} woke after {seconds} s, within its lease: {said} stale frames")


async def freezes(scale: Scale) -> Row:
    """C2: SIGSTOP for 1, 5, 15 and 60 s, 20 of them over two fleets side by side."""
    row = Row("C2", "SIGSTOP 1/5/15/60 s")
    if scale.runs:
        await short_freezes(scale, row, (SHORT_FREEZES * 4)[: scale.runs])
    else:
        async with asyncio.TaskGroup() as group:
            group.create_task(short_freezes(scale, row, SHORT_FREEZES))
            group.create_task(long_freezes(scale, row, LONG_FREEZES))
    row.hold_gap(GAP_FROZEN_MS_MAX)
    return row


# --- C3 -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hole:
    """A black hole to make: on which node, which way."""

    node: str
    ways: tuple[Way, ...]

    @property
    def kind(self) -> str:
        return f"black hole {'both' if len(self.ways) != 1 else self.ways[0]}"


@dataclass(slots=True)
class Noticed:
    """After how many seconds the head gave links up, whichever way they carried nothing."""

    dead_s: dict[str, list[float]] = field(default_factory=dict)
    missed: int = 0

    def check(self, row: Row) -> None:
        """Every link is dead within 5 s, also one on which the node can be heard and does not hear."""
        row.check(self.missed == 0, f"{self.missed} black holes were not noticed")
        for kind, seconds in sorted(self.dead_s.items()):
            words = f"{kind}: dead after {max(seconds):.1f} s (bar {DEAD_S_MAX:.0f})"
            row.check(max(seconds) <= DEAD_S_MAX, words)


async def fall_silent(run: Run, hole: Hole, noticed: Noticed) -> None:
    """Hold a node's cable for a while; notes how long the head took to give the link up."""
    proxy = run.site.proxies[hole.node]
    began_ms = run.fault(hole.kind, hole.node)
    proxy.hold(*hole.ways)
    await asyncio.sleep(HOLE_S)
    with suppress(TimeoutError):
        await until(partial(is_lost, run, hole.node, began_ms), LEASE_S + 2 - HOLE_S)
    proxy.release()
    lost_ms = run.history.lost_at_ms(hole.node, began_ms)
    if lost_ms is None:
        noticed.missed += 1
        return
    noticed.dead_s.setdefault(hole.kind, []).append((lost_ms - began_ms) / 1000)


async def black_holes_of_fleet(scale: Scale, row: Row, count: int, seed: int) -> None:
    async with AsyncExitStack() as stack:
        site = await opened(stack, Setup(nodes=5, flags=(*MOCK, *rates(DECODE))))
        load, noticed = Load(scale.crowd(8), seed=seed), Noticed()
        ways: tuple[tuple[Way, ...], ...] = ((), (Way.DOWN,), (Way.UP,))
        async with running(site, load) as run:
            for first in range(0, count, 2):
                await run.until_streaming(max(1, load.clients // 2))
                numbers = range(first, min(count, first + 2))
                holes = [Hole(site.names[n % 5], ways[n % 3]) for n in numbers]
                await asyncio.gather(*(fall_silent(run, hole, noticed) for hole in holes))
                await run.outlive()
                await run.until_up(5)
        row.add(run.history)
        noticed.check(row)


async def black_holes(scale: Scale) -> Row:
    """C3: cables that carry nothing one way, the other, or both, 20 of them over two fleets side by side."""
    row = Row("C3", "black hole up/down/both")
    count = scale.faults(20)
    async with asyncio.TaskGroup() as group:
        for part in range(-(-count // 10)):
            some = min(10, count - 10 * part)
            group.create_task(black_holes_of_fleet(scale, row, some, scale.seed + part))
    row.hold_gap(GAP_FROZEN_MS_MAX)
    return row


# --- C4 and C5 ------------------------------------------------------------------------------------


async def strike_all(
    scale: Scale, row: Row, count: int, kinds: Sequence[tuple[str, Way | None, End | None]]
) -> None:
    """Strike serving nodes' links one after the other, in a fresh fleet: by kind, at a drawn byte."""
    async with AsyncExitStack() as stack:
        site = await opened(stack, Setup(nodes=5, flags=(*MOCK, *rates(DECODE))))
        draws, load = Draws(scale.seed), Load(scale.crowd(8), seed=scale.seed)
        async with running(site, load) as run:
            for number in range(count):
                await run.until_streaming(max(1, load.clients // 2))
                name = await run.victim(draws)
                kind, way, end = kinds[number % len(kinds)]
                began_ms = run.fault(kind, name)
                strike(site, name, way, end, draws)
                await until(partial(is_lost, run, name, began_ms), 10)
                await run.outlive()
                await run.until_up(5)
        row.add(run.history)


def strike(site: Site, name: str, way: Way | None, end: End | None, draws: Draws) -> None:
    proxy = site.proxies[name]
    if way is None:
        proxy.cut(end or End.RST)
    else:
        proxy.wound(way, 1 + draws.below(400), end=end, bit=draws.below(8))


def is_lost(run: Run, name: str, since_ms: float) -> bool:
    return run.history.lost_at_ms(name, since_ms) is not None


async def cut_links(scale: Scale) -> Row:
    """C4: RST, FIN in mid-frame and cuts in a living fleet; then one conversation cut at each of its bytes."""
    row = Row("C4", "RST, FIN in mid-frame, cut at every byte")
    kinds = (
        ("RST", None, End.RST), ("FIN in mid-frame", Way.DOWN, End.FIN),
        ("RST in mid-frame", Way.DOWN, End.RST), ("cut upwards", Way.UP, End.RST), ("FIN", None, End.FIN),
    )  # fmt: skip
    await strike_all(scale, row, scale.faults(10), kinds)
    row.hold_gap(GAP_KILLED_MS_MAX)
    await strike_conversations(row, "fin", 1 if not scale.runs else 97)
    await strike_conversations(row, "rst", 7 if not scale.runs else 97)
    return row


async def strike_conversations(row: Row, wound: str, step: int) -> None:
    """Have a process of its own strike one conversation at every `step`-th byte, and hold it to the law."""
    command = [sys.executable, "-m", "tests.chaos.exchange", "--wound", wound, "--step", str(step)]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        told, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
    came = json.loads(told) if child.returncode == 0 else {}
    row.faults += came.get("struck", 0)
    is_right = bool(came) and came["false"] == came["late"] == 0 < came["struck"]
    row.check(is_right, f"{wound} at every {step}. byte: {came or child.returncode}")


async def flipped_bits(scale: Scale) -> Row:
    """C5: one bit flipped in a living fleet's links; then at 2,000 places of one conversation over TLS."""
    row = Row("C5", "one bit flipped")
    kinds = (("flip downwards", Way.DOWN, None), ("flip upwards", Way.UP, None))
    await strike_all(scale, row, scale.faults(10), kinds)
    row.hold_gap(GAP_KILLED_MS_MAX)
    await strike_conversations(row, "bit", 5 if not scale.runs else 211)
    return row


SCENARIOS = {"C2": freezes, "C3": black_holes, "C4": cut_links, "C5": flipped_bits}
