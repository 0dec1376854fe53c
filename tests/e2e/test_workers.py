"""`serve --workers 2`: real processes on one port that answer as one, lose one of them, and drain together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from superfluid_core.clock import SystemClock
from superfluid_head.bench.rig import Child, Rig, program
from superfluid_head.bench.spent import tree
from superfluid_head.bench.streams import Outcome, request_of, stream_all

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = ("--engine", "mock", "--model", "demo", "--mock-eos", "0", "--max-batch", "32")
STREAMS = 12


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


@pytest.fixture(scope="module")
def head(rig: Rig) -> Child:
    key = rig.make_key()
    node = rig.start_node("node-0", *FLAGS, "--mock-rates", "prefill=0,decode=25", key=key)
    rig.wait_ready(node)
    made = rig.start_head("demo", "--workers", "2", nodes=[node.listen], key=key)
    rig.wait_ready(made)
    until(lambda: is_whole(made))
    return made


def until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


def get(head: Child, path: str) -> Any:
    """Ask over a connection of its own, which may come to either worker."""
    reply = httpx.get(head.url + path, timeout=10, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.text if path == "/metrics" else reply.json()


def sample(page: str, name: str) -> float:
    rows = (line for line in page.splitlines() if line.startswith((name + "{", name + " ")))
    return sum(float(row.rpartition(" ")[2]) for row in rows)


def is_whole(head: Child) -> bool:
    """Whether both workers answer and reach the node."""
    try:
        page = get(head, "/metrics")
        return sample(page, "superfluid_head_workers") == 2 and all(
            get(head, "/readyz")["status"] == "ok" for _ in range(6)
        )
    except (httpx.HTTPError, AssertionError):
        return False


@contextmanager
def streaming(head: Child, tokens: int) -> Iterator[Callable[[], list[Outcome]]]:
    """Have STREAMS answers under way; call what is yielded to hear how they ended."""
    body = {"model": get(head, "/v1/models")["data"][0]["id"], "max_tokens": tokens, "stream": True}
    bodies = [
        {**body, "messages": [{"role": "user", "content": f"Count {n}"}]} for n in range(STREAMS)
    ]
    requests = [request_of(head.url, each) for each in bodies]

    async def run() -> list[Outcome]:
        return await stream_all(head.url, requests, SystemClock())

    with asyncio.Runner() as runner:
        running: asyncio.Task[list[Outcome]] = runner.get_loop().create_task(run())

        def turn(seconds: float) -> None:
            runner.run(asyncio.wait_for(asyncio.shield(asyncio.wait([running])), seconds))

        deadline = time.monotonic() + 20
        while get(head, "/v1/fleet")["running"] < STREAMS:
            assert time.monotonic() < deadline, "the streams did not begin"
            try:
                turn(0.05)
            except TimeoutError:
                continue
        yield lambda: runner.run(_result(running))


async def _result(running: asyncio.Task[list[Outcome]]) -> list[Outcome]:
    return await running


def watched(head: Child) -> dict[str, Any]:
    """The first state of the dashboard's stream, from whichever worker it reached."""
    url = f"{head.url}/v1/fleet/events?every_ms=250"
    with httpx.stream("GET", url, timeout=20, trust_env=False) as reply:
        data = next(line for line in reply.iter_lines() if line.startswith("data: {"))
    found: dict[str, Any] = json.loads(data[6:])
    return found


def test_figures_and_charts_cover_all_workers_whichever_is_asked(head: Child) -> None:
    def runs_everywhere() -> bool:
        state = watched(head)
        counts = (state["running"], state["sessions_total"], len(state["sessions"]))
        return counts == (STREAMS,) * 3 and state["nodes"][0]["sessions"] == STREAMS

    def is_measured(state: dict[str, Any]) -> bool:
        assert "share" not in state
        vitals = state["vitals"]
        points = [point["ttft_ms"]["count"] for point in state.get("points", ())]
        return (
            vitals["ttft_ms"]["count"] == STREAMS
            and vitals["itl_ms"]["count"] > STREAMS * 30
            and (not points or sum(points) == STREAMS)
        )

    with streaming(head, 150) as ended:
        for _ in range(3):
            until(runs_everywhere)
        outcomes = ended()
    assert [each.error for each in outcomes] == [None] * STREAMS
    for _ in range(4):
        assert is_measured(get(head, "/v1/fleet"))
        until(lambda: is_measured(watched(head)))
    command = [*program("superfluid"), "top", "--once", "--url", head.url]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "serving: 1 of 1 nodes up, 0 running" in told
    assert "first token p50 -" not in told


def told_until(
    head: Child, seen: str, is_enough: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """Read events after those that `seen` names until there are enough; each with its id."""
    found: list[dict[str, Any]] = []
    url, name = f"{head.url}/v1/fleet/events", ""
    with httpx.stream(
        "GET", url, headers={"last-event-id": seen}, timeout=20, trust_env=False
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("id: "):
                name = line[4:]
            elif line.startswith("data: {"):
                found.append({**json.loads(line[6:]), "id": name})
            if is_enough(found):
                break
    return found


def places(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return sorted((each["worker"], each["sequence"]) for each in events)


def test_events_of_all_workers_come_whichever_is_asked_and_go_on_at_any(head: Child) -> None:
    with streaming(head, 10) as ended:
        outcomes = ended()
    assert [each.error for each in outcomes] == [None] * STREAMS

    def is_all(found: list[dict[str, Any]]) -> bool:
        placed = [each["worker"] for each in found if each["kind"] == "placed"]
        return len(placed) >= STREAMS and set(placed) == {0, 1}

    whole = told_until(head, "0", is_all)
    assert len(set(places(whole))) == len(whole)
    begun = whole[: len(whole) // 2]

    def goes_on(found: list[dict[str, Any]]) -> bool:
        return set(places([*begun, *found])) >= set(places(whole))

    for _ in range(4):  # either worker is asked
        every = places([*begun, *told_until(head, begun[-1]["id"], goes_on)])
        assert len(set(every)) == len(every), "none comes twice"


def test_clients_are_spread_and_metrics_are_one(head: Child) -> None:
    before = sample(get(head, "/metrics"), "superfluid_head_generations_total")
    with streaming(head, 60) as ended:
        shares = [each["running"] for each in get(head, "/v1/fleet")["workers"]]
        outcomes = ended()
    assert [each.error for each in outcomes] == [None] * STREAMS
    assert len(shares) == 2
    assert min(shares) > 0
    assert sum(shares) == STREAMS
    for _ in range(4):
        page = get(head, "/metrics")
        assert sample(page, "superfluid_head_generations_total") - before == STREAMS
        assert sample(page, "superfluid_head_node_up") == 1


def test_a_session_is_found_whichever_worker_is_asked(head: Child) -> None:
    with streaming(head, 200) as ended:
        listed = get(head, "/v1/sessions")["data"]
        assert len(listed) == STREAMS
        for session in listed:
            url = f"{head.url}/v1/sessions/{session['id']}"
            reply = httpx.delete(url, timeout=10, trust_env=False)
            assert reply.status_code == 200
            assert reply.json()["cancelled"]
        outcomes = ended()
    assert not any(each.is_whole for each in outcomes)
    assert httpx.get(f"{head.url}/v1/sessions/none", trust_env=False).status_code == 404


def test_what_is_done_to_a_node_is_done_by_all(head: Child) -> None:
    for way in ("drain", "undrain"):
        url = f"{head.url}/v1/fleet/nodes/node-0/{way}"
        assert httpx.post(url, timeout=10, trust_env=False).status_code == 200
        seen = {get(head, "/v1/fleet")["nodes"][0]["is_draining"] for _ in range(8)}
        assert seen == {way == "drain"}


def test_what_all_workers_see_of_a_node_is_told_once(head: Child) -> None:
    url = f"{head.url}/v1/fleet/events"
    with httpx.stream("GET", url, timeout=20, trust_env=False) as reply:
        lines = reply.iter_lines()

        def until_both_place() -> list[dict[str, Any]]:
            """Read until each worker has told of what it did just now, all of it, hence of all that it saw before."""
            told: list[dict[str, Any]] = []
            while {each["worker"] for each in told if each["kind"] == "placed"} < {0, 1}:
                with streaming(head, 10) as ended:
                    ended()
                placed: set[str] = set()
                while len(placed) < 10:
                    told += [json.loads(line[6:]) for line in [next(lines)] if line[:6] == "data: "]
                    if told and told[-1]["kind"] == "placed":
                        placed.add(told[-1]["request"])
            return told

        until_both_place()
        for way in ("drain", "undrain", "drain", "undrain"):
            way_url = f"{head.url}/v1/fleet/nodes/node-0/{way}"
            assert httpx.post(way_url, timeout=10, trust_env=False).status_code == 200
        kinds = [each["kind"] for each in until_both_place()]
    assert [kinds.count(way) for way in ("drain", "undrain")] == [2, 2]


def test_a_worker_that_dies_comes_back_and_the_other_serves_on(head: Child) -> None:
    workers = tree(head.pid)[1:3]
    with streaming(head, 100) as ended:
        os.kill(workers[0], signal.SIGKILL)
        served = 0
        for _ in range(
            6
        ):  # what still waited in the dead one's queue is reset; whoever asks again is served
            try:
                served += get(head, "/readyz")["status"] == "ok"
            except httpx.HTTPError:
                continue
        assert served > 0
        outcomes = ended()
    broken = sum(not each.is_whole for each in outcomes)
    assert 0 < broken < STREAMS
    until(lambda: is_whole(head))
    again = tree(head.pid)[1:]
    assert workers[0] not in again
    assert workers[1] in again
    assert "a worker ended; it is started again" in head.log_text()


def test_workers_that_cannot_serve_end_their_parent_with_their_own_status(rig: Rig) -> None:
    child = rig.start_head("/nowhere/at/all", "--workers", "2", nodes=["127.0.0.1:9"])
    assert child.process.wait(timeout=40) == 3
    assert "a worker could not start" in child.log_text()


def test_all_drain_when_the_parent_is_told_to_stop(head: Child) -> None:
    workers = tree(head.pid)[1:]
    with streaming(head, 60) as ended:
        os.kill(head.pid, signal.SIGTERM)
        outcomes = ended()
    assert [each.error for each in outcomes] == [None] * STREAMS
    assert head.process.wait(timeout=15) == 0
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
