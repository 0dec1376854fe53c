"""How late the head's event loop is while large prompts come in and streams run (decisions 24 and 39): a table, exit 1 on a missed bar.

    python -m tests.unit.head_api.soak_lag [--posts 20] [--streams 50]

The head is the product's own app, server and text workers with the demo model's tokenizer, over a fleet that plays answers. Clients
are a process of their own. A probe on the head's loop sleeps a few milliseconds again and again; what it oversleeps is the lag.
Each kind of prompt, after none at all, is refused as too long: 8 MB by its bytes, 1 MB by the process that tokenizes it, 200 kB by a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from superfluid_core.limits import HttpLimits
from superfluid_core.modelfiles.resolve import resolve
from superfluid_core.modelfiles.text_model import from_text_files
from superfluid_head.app import build_app
from superfluid_head.http_server import http_server
from superfluid_head.listeners import bound, open_sockets
from superfluid_head.text.catalog import TextCatalog
from superfluid_head.text.chat import TextWorkers
from superfluid_head.text.dialects.detect import DialectChoice
from tests.unit.head_api.conftest import Bench

BAR_MS = 50.0
PROBE_S = 0.002
KINDS = {"none": 0, "8 MB": 8_000_000, "1 MB": 1_000_000, "200 kB": 200_000}
WORDS = "The quick brown fox jumps over the lazy dog, said nobody in particular. "


@dataclass
class Probe:
    """How late sleeps end, and how much of that this process computed itself: the rest was other processes' time."""

    late_ms: list[tuple[float, float]] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            due, used = time.perf_counter() + PROBE_S, time.process_time()
            await asyncio.sleep(PROBE_S)
            late, used = time.perf_counter() - due, time.process_time() - used
            self.late_ms.append((late * 1_000, min(late, used) * 1_000))

    def take(self) -> list[tuple[float, float]]:
        taken, self.late_ms = self.late_ms, []
        return taken


async def client(url: str, size: int, posts: int, streams: int) -> None:
    """Body of the clients' process: streams throughout, posts one after another."""
    text = (WORDS * (size // len(WORDS) + 1))[:size]
    large = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
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
            if not size:
                await asyncio.sleep(3)
            for _ in range(posts if size else 0):
                reply = await http.post(
                    "/v1/chat/completions",
                    content=large,
                    headers={"content-type": "application/json"},
                )
                assert reply.json()["error"]["code"] == "context_length_exceeded", reply.text[:300]
            for each in readers:
                each.cancel()


async def measure(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
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
    gc.freeze()  # as `run_head` does
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(server.serve(sockets=sockets)), group.create_task(probe.run())]
        for name, size in KINDS.items():
            command = [sys.executable, "-m", "tests.unit.head_api.soak_lag", "--client", url]
            command += [
                "--size",
                str(size),
                "--posts",
                str(options.posts),
                "--streams",
                str(options.streams),
            ]
            if name == "1 MB":  # the process that tokenizes it has to be there
                await text.encode_texts(["x " * 200_000], 1 << 20, is_raw=False, add_bos=False)
            process = await asyncio.create_subprocess_exec(*command)
            await asyncio.sleep(2)
            probe.take()
            assert await process.wait() == 0
            found[name] = sorted(probe.take())
        server.should_exit = True
        await tasks[0]
        tasks[1].cancel()
    workers.close()
    bench.workers.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--posts", type=int, default=20)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--client")
    options = parser.parse_args()
    if options.client:
        asyncio.run(client(options.client, options.size, options.posts, options.streams))
        return 0
    found = asyncio.run(measure(options))
    print(
        f"event-loop lag over {options.posts} posts beside {options.streams} streams, bar {BAR_MS:.0f} ms"
    )
    for name, late in found.items():
        own = max(own for _, own in late)
        p99 = late[len(late) * 99 // 100][0]
        print(
            f"  {name:>7}: max {late[-1][0]:7.1f} ms (own work {own:5.1f}), p99 {p99:6.1f} ms, {len(late)} samples"
        )
    return 0 if all(late[-1][0] <= BAR_MS for name, late in found.items() if name != "none") else 1


if __name__ == "__main__":
    assert Path("superfluid_head").is_dir(), "run it from the root of the repository"
    raise SystemExit(main())
