"""Scenarios that take whole processes away: C1 kills, C9 an empty fleet, C10 rolling drains, C11 rolling upgrades, C12 the head."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

from superfluid_core.clock import MS, SystemClock
from superfluid_core.limits import LinkLimits
from superfluid_head.bench.load import Answer
from superfluid_head.bench.prose import Draws
from tests.chaos.crowd import Load, Run, running
from tests.chaos.scenario import GAP_KILLED_MS_MAX, Row, Scale
from tests.chaos.site import MOCK, Setup, Site, patched, rates

KILLS_PER_NODE = 2
DECODE = 25
AWAY_SECONDS = 20.0
NO_NODE_SECONDS = 30.0
NO_NODE_SLACK_SECONDS = 4.0


async def opened(stack: AsyncExitStack, setup: Setup) -> Site:
    """Start a site without stopping the loop; it ends with the stack."""
    site = Site(setup)
    stack.push_async_callback(asyncio.to_thread, site.close)
    await asyncio.to_thread(site.__enter__)
    return site


async def kill_once(run: Run, draws: Draws, clients: int) -> None:
    """Kill a serving node in mid-stream, bring it back, and let every answer of that moment end."""
    await run.until_streaming(max(1, clients // 2))
    await asyncio.sleep(draws.below(300) / 1000)
    name = await run.victim(draws)
    run.fault("kill", name)
    run.site.kill(name)
    run.site.reap(name)
    await asyncio.gather(run.outlive(), asyncio.to_thread(run.site.restart, name))


async def kills(scale: Scale) -> Row:
    """C1: kill -9 in mid-stream. A fleet takes two kills a node, so that circuits are not what is measured."""
    row = Row("C1", "kill -9 in mid-stream")
    draws, left = Draws(scale.seed), scale.faults(30)
    while left > 0:
        async with AsyncExitStack() as stack:
            site = await opened(stack, Setup(flags=(*MOCK, *rates(DECODE))))
            count = min(left, KILLS_PER_NODE * len(site.names))
            load = Load(scale.crowd(), seed=scale.seed + left)
            async with running(site, load) as run:
                for _ in range(count):
                    await kill_once(run, draws, load.clients)
            row.add(run.history)
            left -= count
    row.hold_gap(GAP_KILLED_MS_MAX)
    row.check(row.found.moved >= row.faults, f"{row.found.moved} streams moved")
    return row


async def empty_fleet(scale: Scale) -> Row:
    """C9: every node is gone for 20 s and comes back; then for good, and a request waits 30 s for its 503."""
    row = Row("C9", "all nodes gone 20 s, then for good")
    clients = scale.crowd(8)
    async with AsyncExitStack() as stack:
        site = await opened(stack, Setup(flags=(*MOCK, *rates(DECODE))))
        async with running(site, Load(clients, 60, seed=scale.seed)) as run:
            await run.until_streaming(clients // 2)
            run.fault("all killed")
            gone_ms = run.now_ms()
            for name in site.names:
                site.kill(name)
                site.proxies[name].refuse()
            run.stopping.set()
            waiting = asyncio.ensure_future(run.one())
            # how long a start takes is not what is measured: they start at once, and nobody reaches them
            started = [await asyncio.to_thread(site.begin_node, name) for name in site.names]
            await asyncio.to_thread(site.rig.wait_ready, *started)
            await asyncio.sleep(AWAY_SECONDS - (run.now_ms() - gone_ms) / 1000)
            for name in site.names:
                site.proxies[name].accept()
            await asyncio.to_thread(site.wait_linked)
            answer = await waiting
            row.check(answer.is_complete, f"a request made meanwhile: {answer.error or 'answered'}")
        row.add(run.history)
        row.check(
            max(row.found.gaps_ms, default=0.0) >= AWAY_SECONDS * 1000 * 0.9,
            "streams stood still while nobody was there and went on",
        )
        async with running(site, Load(0, seed=scale.seed + 1)) as run:
            run.fault("all killed for good")
            for name in site.names:
                site.kill(name)
            body = {**run.body(), "stream": False}
            del body["stream_options"]
            began_ms = run.now_ms()
            streamed = asyncio.ensure_future(run.one(may_fail=True))
            reply = await run.client.post(site.url + "/v1/chat/completions", json=body)
            waited_s = (run.now_ms() - began_ms) / 1000
            broken = await streamed
        row.add(run.history)
    in_time = NO_NODE_SECONDS <= waited_s <= NO_NODE_SECONDS + NO_NODE_SLACK_SECONDS
    hint = reply.headers.get("retry-after")
    row.check(
        reply.status_code == 503 and hint is not None and in_time,
        f"without a node: {reply.status_code} after {waited_s:.1f} s, Retry-After {hint}",
    )
    row.check(broken.endings == ["error"], f"a stream that waited ends with {broken.endings}")
    return row


async def rolling_drain(scale: Scale) -> Row:
    """C10: every node drains and restarts under load: by SIGTERM with a short grace, by the fleet route, by SIGTERM."""
    row = Row("C10", "rolling drain and restart")
    clients = scale.crowd(24)
    async with AsyncExitStack() as stack:
        flags = (*MOCK, *rates(DECODE), "--drain-grace-ms", "2000")
        site = await opened(stack, Setup(flags=flags))
        async with running(site, Load(clients, 100, seed=scale.seed)) as run:
            for number in range(scale.faults(3)):
                name = site.names[number % len(site.names)]
                await run.until_streaming(clients // 2)
                run.fault("drain", name)
                if number % 2:
                    path = f"/v1/fleet/nodes/{name}/drain"
                    reply = await run.client.post(site.url + path, json={"grace_ms": 1_000})
                    reply.raise_for_status()
                    await run.until_node(name, lambda node: node["sessions"] == 0)
                status = await asyncio.to_thread(site.stop, name)
                row.check(status == 0, f"{name} ended with {status}")
                await asyncio.to_thread(site.restart, name)
        row.add(run.history)
    row.check(row.found.failed == 0, f"{row.found.failed} of {row.found.streams} failed")
    return row


async def rolling_upgrade(scale: Scale) -> Row:
    """C11: nodes and head of two minors of the link meet in both orders, restarted one by one under load.

    There is one released minor so far; the newer one is made by a start script that raises the number and adds a feature.
    """
    row = Row("C11", "rolling upgrade, both orders")
    newer = patched("newer_minor.py")
    clients = scale.crowd(8)
    for order in ("nodes first", "head first"):
        async with AsyncExitStack() as stack:
            wraps = {"head": newer} if order == "head first" else {}
            site = await opened(stack, Setup(flags=(*MOCK, *rates(DECODE)), wraps=wraps))
            async with running(site, Load(clients, 40, seed=scale.seed)) as run:
                for name in site.names:
                    await run.until_streaming(clients // 2)
                    run.fault(f"upgrade, {order}", name)
                    site.wraps[name] = newer
                    status = await asyncio.to_thread(site.stop, name)
                    row.check(status == 0, f"{order}: {name} ended with {status}")
                    await asyncio.to_thread(site.restart, name)
            row.add(run.history)
    row.check(row.found.failed == 0, f"{row.found.failed} of {row.found.streams} failed")
    return row


async def head_killed(scale: Scale) -> Row:
    """C12: the head dies at once, and vanishes behind dead cables: nodes free everything within a lease."""
    row = Row("C12", "head kill -9, and head vanished")
    clients = scale.crowd(16)
    lease_s = LinkLimits().lease_ttl_ms / 1000 + 1.0
    for kind in ("killed", "vanished"):
        async with AsyncExitStack() as stack:
            site = await opened(stack, Setup(flags=(*MOCK, *rates(DECODE))))
            async with running(site, Load(clients, 600, seed=scale.seed)) as run:
                await run.until_streaming(clients)
                run.fault(f"head {kind}")
                if kind == "vanished":
                    for proxy in site.proxies.values():
                        proxy.hold()
                run.stopping.set()
                site.head.signal(signal.SIGKILL)
                began_ms = run.now_ms()
                await until_free(site, lease_s + 10)
                freed_s = (run.now_ms() - began_ms) / 1000
            for entry in run.history.entries:
                entry.may_fail = True
                _check_unfinished(row, entry.answer)
            row.add(run.history)
            row.check(
                freed_s <= lease_s, f"{kind}: nodes free after {freed_s:.1f} s (bar {lease_s})"
            )
    return row


def _check_unfinished(row: Row, answer: Answer) -> None:
    if answer.is_done or "finish" in answer.endings:
        row.missed.append("a stream looks finished although its head was killed")


async def until_free(site: Site, limit_s: float) -> None:
    """Wait until no node holds a session, for so long at most."""
    clock = SystemClock()
    deadline_ns = clock.now_ns() + int(limit_s * 1000) * MS
    while clock.now_ns() < deadline_ns:
        busy = [await asyncio.to_thread(site.busy, name) for name in site.names]
        if not any(busy):
            return
        await asyncio.sleep(0.1)


SCENARIOS = {
    "C1": kills,
    "C9": empty_fleet,
    "C10": rolling_drain,
    "C11": rolling_upgrade,
    "C12": head_killed,
}
