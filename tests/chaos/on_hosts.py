"""Scenarios of clients and hosts that misbehave: C6 slow readers, C7 clocks, C8 full disks, C13 no descriptors, C14 a sick engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from superfluid_head.bench.report import percentile
from superfluid_head.bench.rig import hostport
from tests.chaos.crowd import Load, Run, running
from tests.chaos.history import History, longest_gap_ms
from tests.chaos.on_nodes import opened, until_free
from tests.chaos.scenario import Row, Scale
from tests.chaos.site import (
    MOCK,
    Setup,
    Site,
    Wrap,
    can_unshare,
    cpu_s,
    in_shell,
    in_unshare,
    open_files,
    patched,
    rates,
    rss_bytes,
)

DECODE = 25
MIB = 1 << 20
SLOW_READERS = 200
SLOW_RATE = 4
SLOW_SECONDS = 12.0
WATCHED_SECONDS = 5.0
HUNG_GAP_MS_MAX = 6_500.0


# --- C6 -------------------------------------------------------------------------------------------


@asynccontextmanager
async def slow_readers(run: Run, count: int) -> AsyncIterator[None]:
    """Clients that ask for a long answer and read nothing of it, with the smallest of receive buffers."""
    loop, opened_here = asyncio.get_running_loop(), list[socket.socket]()
    head_host, head_port = run.site.head.ready["http"][0]
    try:
        for _ in range(count):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
            one.setblocking(False)
            opened_here.append(one)
            await loop.sock_connect(one, (head_host, head_port))
            members = {"max_completion_tokens": 2_000, "logprobs": True, "top_logprobs": 20}
            data = json.dumps(run.body(**members)).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: {head_host}:{head_port}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
            )
            await loop.sock_sendall(one, head.encode() + data)
            run.fault("slow reader")
            await asyncio.sleep(0.01)
        yield
    finally:
        for one in opened_here:
            one.close()


def gaps_since(history: History, at_ms: float) -> list[float]:
    """Every time between two pieces of text of answers that began since."""
    recent = [e.answer for e in history.entries if e.answer.started_ms >= at_ms]
    return [gap for answer in recent for gap in answer.gaps_ms()]


async def slow_clients(scale: Scale) -> Row:
    """C6: 200 clients that read nothing beside 32 that read: these must not notice, and nothing may grow."""
    row = Row("C6", "200 slow readers beside fast ones")
    count = scale.runs or SLOW_READERS
    flags = ("--engine", "mock", "--model", "demo", "--mock-eos", "0", "--max-batch", "96")
    async with AsyncExitStack() as stack:
        site = await opened(stack, Setup(flags=(*flags, *rates(SLOW_RATE))))
        async with running(site, Load(scale.crowd(), 16, seed=scale.seed)) as run:
            await run.until_streaming(scale.crowd())
            before_ms = run.now_ms()
            await asyncio.sleep(SLOW_SECONDS)
            calm = percentile(gaps_since(run.history, before_ms), 99)
            pids = [site.head.pid, *(site.node(name).pid for name in site.names)]
            sizes = [rss_bytes(pid) for pid in pids]
            async with slow_readers(run, count):
                slow_ms = run.now_ms()
                await asyncio.sleep(SLOW_SECONDS)
                grown = [rss_bytes(pid) - size for pid, size in zip(pids, sizes, strict=True)]
                beside = percentile(gaps_since(run.history, slow_ms), 99)
            run.stopping.set()
        row.add(run.history)
        await until_free(site, 10)
        busy = sum([await asyncio.to_thread(site.busy, name) for name in site.names])
    row.check(
        beside <= 1.1 * calm,
        f"fast readers' p99 {beside:.0f} ms beside {count} slow ones, {calm:.0f} without (bar +10 %)",
    )
    row.check(grown[0] <= 16 * MIB, f"head grew by {grown[0] / MIB:.1f} MiB (bar 16)")
    row.check(
        max(grown[1:]) <= 16 * MIB, f"nodes by {max(grown[1:]) / MIB:.1f} MiB at most (bar 16)"
    )
    row.check(busy == 0, f"{busy:.0f} lanes busy after the slow ones left")
    return row


# --- C7 -------------------------------------------------------------------------------------------


async def turned_clocks(scale: Scale) -> Row:
    """C7: wall clocks jump a day, a node's boot time jumps by a suspend, another node lives in a time of its own."""
    row = Row("C7", "wall and boot clocks jump")
    fake = patched("fake_clock.py")
    wraps = {"head": fake, "node-0": fake, "node-1": fake}
    namespace = ("--time", "--boottime", "864000", "--monotonic", "3600", "--fork", "--kill-child")
    if can_unshare(*namespace):
        wraps["node-2"] = in_unshare(*namespace)
        row.notes.append("node-2 in a time namespace, 10 days ahead")
    else:
        row.notes.append("no time namespaces here: node-2 shares our clocks")
    clients = scale.crowd(12)
    async with AsyncExitStack() as stack:
        site = await opened(stack, Setup(flags=(*MOCK, *rates(DECODE)), wraps=wraps))
        async with running(site, Load(clients, 60, seed=scale.seed)) as run:
            for name in ("head", "node-0", "node-1", "head", "node-0", "node-1"):
                await run.until_streaming(clients // 2)
                run.fault("wall clock", name)
                site.node(name).signal(signal.SIGUSR1)
                await asyncio.sleep(1.0)
            moves = len(run.history.moved())
            row.check(moves == 0, f"{moves} moves by wall clocks")
            placed = {e.fields["node"] for e in run.history.events if e.kind == "placed"}
            row.check(placed == set(site.names), f"sessions ran on {sorted(placed)}")
            for name in ("node-0", "node-1"):
                await run.until_node(name, lambda node: node["sessions"] > 0)
                run.fault("boot time", name)
                site.node(name).signal(signal.SIGUSR2)
                await run.outlive()
        row.add(run.history)
        fenced = [
            await asyncio.to_thread(
                site.node_metric, name, 'superfluid_sessions_total{finish="fenced"}'
            )
            for name in ("node-0", "node-1")
        ]
    row.check(min(fenced) > 0, f"fenced by boot time: {fenced}")
    return row


# --- C8 -------------------------------------------------------------------------------------------


async def full_disks(scale: Scale) -> Row:
    """C8: logs and the record of a node, and the log of the head, on disks of 64 KiB that are full."""
    row = Row("C8", "disk full under log and record")
    if not can_unshare("--mount"):
        row.is_run = False
        row.notes.append("needs a mount namespace, which this user may not make")
        return row
    with tempfile.TemporaryDirectory() as folder:

        def on_small_disk(fill_bytes: int, *flags: str) -> Wrap:
            script = (
                f"mount -t tmpfs -o size=64k tmpfs {folder} || exit 9; "
                f'head -c {fill_bytes} /dev/zero >{folder}/fill; exec "$@" >{folder}/log 2>&1'
            )
            shell = in_shell(script)
            return lambda command: in_unshare("--mount")(shell([*command, *flags]))

        # the record needs room to begin, or the node says so and does not start
        wraps = {
            "node-0": on_small_disk(40_000, "--record", f"{folder}/record"),
            "head": on_small_disk(65_536),
        }
        async with AsyncExitStack() as stack:
            site = await opened(stack, Setup(flags=(*MOCK, *rates(DECODE)), wraps=wraps))
            row.faults += 2
            async with running(site, Load(scale.crowd(12), seed=scale.seed)) as run:
                await asyncio.sleep(WATCHED_SECONDS)
                for name in ("node-0", "head"):
                    free = os.statvfs(f"/proc/{site.node(name).pid}/root{folder}").f_bavail
                    row.check(free <= 1, f"{name}'s disk has {free} blocks left")
            row.add(run.history)
            alive = [site.node(name).is_running for name in ("head", *site.names)]
            row.check(all(alive), "every process lives")
            row.check(row.found.streams > 0, f"{row.found.streams} answers meanwhile")
    return row


# --- C13 ------------------------------------------------------------------------------------------


@contextmanager
def many_connections(address: str, count: int) -> Iterator[None]:
    """Hold connections that say nothing; what is not accepted waits in the backlog."""
    host, _, port = address.rpartition(":")
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex((host, int(port)))
            held.append(one)
        yield
    finally:
        for one in held:
            one.close()


async def no_descriptors(scale: Scale) -> Row:
    """C13: head and a node with 64 descriptors each, and more connections than that: no busy loop, and they recover."""
    row = Row("C13", "no descriptors left")
    few = in_shell('ulimit -n 64; exec "$@"')
    clients = scale.crowd(6)
    setup = Setup(flags=(*MOCK, *rates(DECODE)), wraps={"head": few, "node-0": few})
    async with AsyncExitStack() as stack:
        site = await opened(stack, setup)
        node = site.node("node-0")
        places = {
            "head": site.url.removeprefix("http://"),
            "node-0": hostport(node.ready["metrics"]),
        }
        async with running(site, Load(clients, 150, seed=scale.seed)) as run:
            await run.until_streaming(clients)
            for name, address in places.items():
                pid = site.node(name).pid
                calm_s = await cpu_of(pid, 2.0)
                run.fault("no descriptors", name)
                with many_connections(address, 120):
                    await asyncio.sleep(0.5)
                    row.notes.append(f"{name}: {open_files(pid)} of 64 descriptors in use")
                    busy_s = await cpu_of(pid, WATCHED_SECONDS)
                row.check(
                    busy_s <= calm_s + 0.3,
                    f"{name} used {busy_s:.2f} CPU-s a second, {calm_s:.2f} before (bar +0.3)",
                )
                row.check(site.node(name).is_running, f"{name} lives")
            began_ms = run.now_ms()
            answer = await run.one(run.body(max_completion_tokens=4))
            row.check(answer.is_complete, f"asked anew: {(run.now_ms() - began_ms):.0f} ms")
        row.add(run.history)
        reasons = sorted({e.fields["reason"] for e in run.history.events if e.kind == "moved"})
        row.check(not reasons, f"moves meanwhile: {reasons or 'none'}")
        gap_ms = max(row.found.gaps_ms, default=0.0)
        raw_ms = max(row.found.raw_gaps_ms, default=0.0)
        row.check(
            gap_ms <= 1_000,
            f"longest gap of the streams meanwhile {gap_ms:.0f} ms (bar 1000; as clients saw it {raw_ms:.0f})",
        )
    return row


async def cpu_of(pid: int, seconds: float) -> float:
    """CPU seconds per second of a process over a while."""
    before = cpu_s(pid)
    await asyncio.sleep(seconds)
    return (cpu_s(pid) - before) / seconds


# --- C14 ------------------------------------------------------------------------------------------

ERROR_WORD, HANG_WORD = "quicksandberg", "stillwaterton"


async def sick_engines(scale: Scale) -> Row:
    """C14: an exception on one request, on every node; then one request that hangs the engine of the node it is on."""
    row = Row("C14", "engine exception, engine hang")
    with tempfile.TemporaryDirectory() as folder:
        error = json.dumps({"match": ERROR_WORD, "fault": "error", "fault_at": 5})
        hang = json.dumps({"match": HANG_WORD, "fault": "hang", "fault_at": 5})
        both, one = Path(folder) / "both.jsonl", Path(folder) / "one.jsonl"
        both.write_text(f"{error}\n{hang}\n", encoding="utf-8")
        one.write_text(f"{error}\n", encoding="utf-8")
        wraps = {
            f"node-{n}": _with("--mock-script", str(both if n == 0 else one)) for n in range(3)
        }
        async with AsyncExitStack() as stack:
            site = await opened(stack, Setup(flags=(*MOCK, *rates(DECODE)), wraps=wraps))
            load = Load(scale.crowd(16), 60, seed=scale.seed)
            async with running(site, load) as run:
                await run.until_streaming(load.clients)
                for _ in range(scale.faults(5)):
                    run.fault("engine exception")
                    answer = await run.one(worded(run, ERROR_WORD), may_fail=True)
                    row.check(not answer.is_done, f"the sick request: {answer.error}")
            row.add(run.history)
            gap_ms = max(row.found.gaps_ms, default=0.0)
            row.check(gap_ms <= 1_000, f"others' longest standstill {gap_ms:.0f} ms (bar 1000)")
            await hang_one(site, load, row)
    return row


def _with(*flags: str) -> Wrap:
    return lambda command: [*command, *flags]


def worded(run: Run, word: str) -> dict[str, Any]:
    body = run.body()
    body["messages"][0]["content"] += f" {word}."
    return body


async def hang_one(site: Site, load: Load, row: Row) -> None:
    """Hang node-0's engine by a request that only it cannot stand; it moves on, and so do the others there."""
    async with running(site, load) as run:
        await run.until_streaming(load.clients)
        run.fault("engine hang", "node-0")
        async with asyncio.TaskGroup() as group:
            for _ in range(len(site.names) * 2):
                group.create_task(run.one(worded(run, HANG_WORD)))
    moved = run.history.moved()
    gaps = {e.answer.request_id: longest_gap_ms(e.answer, run.history) for e in run.history.entries}
    row.add(run.history)
    there = max((gap for name, gap in gaps.items() if name in moved), default=0.0)
    elsewhere = max((gap for name, gap in gaps.items() if name not in moved), default=0.0)
    row.check(bool(moved), f"{len(moved)} moved away from the hung engine")
    row.check(elsewhere <= 1_000, f"standstill on other nodes {elsewhere:.0f} ms (bar 1000)")
    row.check(
        there <= HUNG_GAP_MS_MAX,
        f"on the hung node {there:.0f} ms (a hang is a step of 5 s: bar {HUNG_GAP_MS_MAX:.0f})",
    )


SCENARIOS = {
    "C6": slow_clients,
    "C7": turned_clocks,
    "C8": full_disks,
    "C13": no_descriptors,
    "C14": sick_engines,
}
