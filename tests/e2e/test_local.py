"""One box: `superfluid serve MODEL` starts its own node and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from superfluid_core.clock import SystemClock
from superfluid_head.bench.load import Answer, chat, chat_body, http_client
from superfluid_head.bench.rig import Rig
from superfluid_head.bench.small_fleet import wait_linked

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def children_of(pid: int) -> list[int]:
    """Process ids whose parent is `pid`, where /proc tells."""
    path = f"/proc/{pid}/task/{pid}/children"
    if not os.path.exists(path):
        return []
    with open(path, encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_command_serves_a_model_and_takes_its_node_along(rig: Rig) -> None:
    head = rig.start_head("demo", "--node-arg=--engine=mock")
    rig.wait_ready(head, timeout_s=30)
    wait_linked(rig, head, 1)

    async def ask() -> Answer:
        body = chat_body("", "Hello.", 8, ignore_eos=True)
        del body["model"]
        async with http_client() as client:
            return await chat(client, head.url, body, SystemClock())

    answer = asyncio.run(ask())
    assert answer.is_complete, answer.error
    assert answer.completion_tokens == 8
    nodes = children_of(head.pid)
    assert nodes or not os.path.exists("/proc")
    head.signal(signal.SIGTERM)
    assert head.process.wait(timeout=20) == 0
    assert not [pid for pid in nodes if is_running(pid)]
