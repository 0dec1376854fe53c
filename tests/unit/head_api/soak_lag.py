"""How late the head's event loop is while large prompts come in and streams run (decisions 24 and 39): a table, exit 1 on a missed bar.

    python -m tests.unit.head_api.soak_lag [--posts 20] [--streams 50]

The head is the product's own app, server and text workers with the demo model's tokenizer, over a fleet that plays answers. Clients
are a process of their own. A probe on the head's loop sleeps a few milliseconds again and again; what it oversleeps is the lag.
Three figures of it: what the clock says; what this process computed meanwhile in all its threads, which the clock does not exceed on a
quiet machine; and what the loop's own thread computed. Each kind of body, after none at all, is refused: 8 MB by its bytes (plain text, text
that JSON escapes, and what is not ASCII), 1 MB by the process that tokenizes it, 200 kB by a thread, half a million ids by their number,
and 16 MiB of small values before they are made.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from superfluid_core.collector import Collector
from superfluid_core.limits import HttpLimits
from superfluid_core.modelfiles.resolve import resolve
from superfluid_core.modelfiles.text_model import from_text_files
from superfluid_head.app import build_app
from superfluid_head.http_server import http_server
from superfluid_head.listeners import bound, open_sockets
from superfluid_head.server import SWITCH_INTERVAL_S
from superfluid_head.text.catalog import TextCatalog
from superfluid_head.text.chat import TextWorkers
from superfluid_head.text.dialects.detect import DialectChoice
from tests.unit.head_api.conftest import Bench

BAR_MS = 50.0
PROBE_S = 0.002
WORDS = "The quick brown fox jumps over the lazy dog, said nobody in particular. "
ROOM = 16 * (1 << 20) - 300


def _prompt(size: int, words: str = WORDS, *, is_escaped: bool = True) -> bytes:
    text = (words * (size // len(words) + 1))[:size]
    content = {"messages": [{"role": "user", "content": text}]}
    return json.dumps(content, ensure_ascii=is_escaped).encode()


def _values(unit: bytes, size: int = ROOM) -> bytes:
    front = b'{"messages":[{"role":"user","content":"hi"}],"a":['
    return front + unit * (size // len(unit)) + unit[:-1] + b"]}"


KINDS: dict[str, Callable[[], bytes]] = {
    "none": lambda: b"",
    "8 MB": lambda: _prompt(8_000_000),
    "8 MB of quotes": lambda: _prompt(4_000_000, '"'),
    "8 MB of CJK": lambda: _prompt(2_660_000, "日本語の文", is_escaped=False),
    "8 MB of \\u": lambda: _prompt(1_330_000, "日本語の文"),
    "1 MB": lambda: _prompt(1_000_000),
    "200 kB": lambda: _prompt(200_000),
    "500k ids": lambda: json.dumps({"prompt": [17] * 499_000}).encode(),
    "16 MiB of 1,": lambda: _values(b"1,"),
    '16 MiB of "",': lambda: _values(b'"",'),
    "16 MiB of {},": lambda: _values(b"{},"),
    '16 MiB of "a":1,': lambda: b"{" + b'"a":1,' * (ROOM // 6) + b'"a":1}',
}


@dataclass
class Probe:
    """How late sleeps end, and how much of that this process computed itself: the rest was other processes' time."""

    late_ms: list[tuple[float, float, float]] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + PROBE_S
            used, own = time.process_time(), time.thread_time()
            await asyncio.sleep(PROBE_S)
            late = time.perf_counter() - due
            used, own = time.process_time() - used, time.thread_time() - own
            self.late_ms.append((late * 1e3, min(late, used) * 1e3, min(late, own) * 1e3))

    def take(self) -> list[tuple[float, float, float]]:
        taken, self.late_ms = self.late_ms, []
        return taken


async def client(url: str, kind: str, posts: int, streams: int) -> None:
    """Body of the clients' process: streams throughout, posts one after another."""
    large = KINDS[kind]()
    path = "/v1/completions" if b'"prompt"' in large[:20] else "/v1/chat/completions"
    small: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100_000, "stream": True}  # fmt: skip
    limits = httpx.Limits(max_connections=streams + 8)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120, trust_env=False) as http:

        async def read() -> None:
            small["max_tokens"] = 4_000
            async with http.stream("POST", "/v1/chat/completions", json=small) as reply:
                async for _ in reply.aiter_raw():
                    pass

        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(read()) for _ in range(streams)]
            await asyncio.sleep(1)
            if not large:
                await asyncio.sleep(3)
            for _ in range(posts if large else 0):
                sent = {"content-type": "application/json"}
                reply = await http.post(path, content=large, headers=sent)
                wanted = ("context_length_exceeded", "invalid_json")["16" in kind]
                assert reply.json()["error"]["code"] == wanted, reply.text[:300]
            for each in readers:
                each.cancel()


async def measure(options: argparse.Namespace) -> dict[str, list[tuple[float, float, float]]]:
    limits = HttpLimits()
    workers = TextWorkers(limits)
    texts = TextCatalog(workers, DialectChoice())
    texts.add("org/m", from_text_files(resolve("demo").text_files()))
    (text,) = texts
    bench = Bench(limits=limits)
    bench.fleet.served[0].text = text.fingerprint
    bench.fleet.served[0].window = text.window
    bench.fleet.script.steps = [[token] for token in range(1_000, 1_050)]
    bench.fleet.script.step_s = 0.02
    object.__setattr__(bench.head, "texts", texts)
    sockets = open_sockets([("127.0.0.1", 0)])
    url = f"http://127.0.0.1:{bound(sockets)[0][1]}"
    server = http_server(build_app(bench.head), limits)
    probe, found = Probe(), {}
    gc.collect()
    collector = Collector(lambda: False)  # as `run_head` has it, and this too
    collector.begin()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(server.serve(sockets=sockets)), group.create_task(probe.run())]
        tasks.append(group.create_task(collector.run()))
        for name in KINDS:
            command = [sys.executable, "-m", "tests.unit.head_api.soak_lag", "--client", url]
            command += ["--kind", name, "--posts", str(options.posts)]
            command += ["--streams", str(options.streams)]
            if name == "1 MB":  # the process that tokenizes it has to be there
                await text.encode_texts(["x " * 200_000], 1 << 20, is_raw=False, add_bos=False)
            process = await asyncio.create_subprocess_exec(*command)
            await asyncio.sleep(2)
            probe.take()
            assert await process.wait() == 0
            found[name] = sorted(probe.take())
        server.should_exit = True
        await tasks[0]
        for each in tasks[1:]:
            each.cancel()
    workers.close()
    bench.workers.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--posts", type=int, default=20)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--kind", choices=list(KINDS))
    parser.add_argument("--client")
    options = parser.parse_args()
    if options.client:
        asyncio.run(client(options.client, options.kind, options.posts, options.streams))
        return 0
    found = asyncio.run(measure(options))
    print(
        f"event-loop lag over {options.posts} posts beside {options.streams} streams, bar {BAR_MS:.0f} ms"
    )
    for name, late in found.items():
        used, own = max(used for _, used, _ in late), max(own for _, _, own in late)
        p99 = late[len(late) * 99 // 100][0]
        shown = f"max {late[-1][0]:6.1f} ms (process {used:5.1f}, loop {own:5.1f}), p99 {p99:5.1f}"
        print(f"  {name:>16}: {shown}, {len(late)} samples")
    return 0 if all(late[-1][0] <= BAR_MS for name, late in found.items() if name != "none") else 1


if __name__ == "__main__":
    assert Path("superfluid_head").is_dir(), "run it from the root of the repository"
    raise SystemExit(main())
