"""Classes, gates and figures through real processes: who goes first, who is refused, and what is told of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from superfluid_core.clock import SystemClock
from superfluid_head.bench.load import Answer, chat, chat_body, http_client
from superfluid_head.bench.rig import Child, Rig, hostport, program
from superfluid_head.bench.small_fleet import SmallFleet, wait_linked
from tests.e2e.conftest import MOCK

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LANES = 2
PACED = (*MOCK, "--max-batch", str(LANES), "--mock-rates", "prefill=20000,decode=100")
QOS = "x-superfluid-qos"


def get(url: str) -> Any:
    reply = httpx.get(url, timeout=10, trust_env=False)
    assert reply.status_code == httpx.codes.OK, reply.text
    return reply.json()


def post(url: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    """Post a chat; `headers` with underscores for dashes."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    path = f"{url}/v1/chat/completions"
    return httpx.post(path, json=body, headers=sent, timeout=30, trust_env=False)


def plain_body(prompt: str, tokens: int) -> dict[str, Any]:
    body = chat_body("", prompt, tokens, ignore_eos=True, stream=False)
    del body["model"], body["stream_options"]
    return body


async def ask(url: str, body: dict[str, Any], qos: str, on_chunk: Any = None) -> Answer:
    async with http_client() as client:
        client.headers[QOS] = qos
        return await chat(client, url, body, SystemClock(), on_chunk)


async def ask_all(url: str, bodies: Sequence[dict[str, Any]], qos: str) -> list[Answer]:
    return list(await asyncio.gather(*(ask(url, body, qos) for body in bodies)))


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Poll without blocking the loop that reads the streams."""
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.02)


def scheduler_total(url: str) -> dict[str, Any]:
    total: dict[str, Any] = get(f"{url}/scheduler/stats")["total"]
    return total


class RecordedFleet:
    """Two nodes that write down what their schedulers are told, and a head."""

    def __init__(self, rig: Rig) -> None:
        key = rig.make_key()
        names = ("node-0", "node-1")
        self.recordings = [rig.folder / f"{name}.jsonl" for name in names]
        self.nodes = [
            rig.start_node(name, *PACED, "--record", str(path), key=key)
            for name, path in zip(names, self.recordings, strict=True)
        ]
        rig.wait_ready(*self.nodes)
        head = rig.start_head("demo", nodes=[node.listen for node in self.nodes], key=key)
        rig.wait_ready(head)
        wait_linked(rig, head, len(self.nodes))
        self.url = head.url


@pytest.fixture(scope="module")
def recorded() -> Iterator[RecordedFleet]:
    """Shared; the test of the recordings, which stops its nodes, is the last to use it."""
    with Rig() as made:
        yield RecordedFleet(made)


@pytest.fixture(scope="module")
def box() -> Iterator[Child]:
    """One box with two lanes, one of which background work must leave alone, and a short queue."""
    with Rig() as made:
        head = made.start_head(
            *("demo", "--engine", "mock", "--node-arg=--mock-rates=prefill=20000,decode=50"),
            "--node-arg=--mock-eos=0",
            *("--max-batch", "2", "--class-lanes", "background=1", "--max-queue", "1"),
            "--http-allow-batch-invariant",
        )
        made.wait_ready(head, timeout_s=30)
        wait_linked(made, head, 1)
        yield head


def body_of(prompt: str, tokens: int) -> dict[str, Any]:
    """Compose a streamed chat that names no model."""
    body = chat_body("", prompt, tokens, ignore_eos=True)
    del body["model"]
    return body


def test_a_chat_gets_its_first_token_while_every_lane_works_in_the_background(
    recorded: RecordedFleet,
) -> None:
    url = recorded.url
    work = [body_of(f"Describe mill {n}.", 150) for n in range(2 * LANES)]
    question = body_of("Who is there?", 20)

    async def scenario() -> tuple[list[Answer], list[Answer], Answer, Answer, list[bool]]:
        undisturbed = await ask_all(url, work, "background")
        alone = await ask(url, question, "interactive")
        running = asyncio.create_task(ask_all(url, work, "background"))
        await until(lambda: scheduler_total(url)["lanes_decoding"] == 2 * LANES)
        still_running: list[bool] = []

        def on_chunk(answer: Answer) -> None:
            if len(answer.at_ms) == 1:
                still_running.append(not running.done())

        amid = await ask(url, question, "interactive", on_chunk)
        return undisturbed, await running, alone, amid, still_running

    undisturbed, disturbed, alone, amid, still_running = asyncio.run(scenario())
    assert still_running == [True]
    assert amid.is_complete, amid.error
    assert (amid.text, amid.completion_tokens) == (alone.text, alone.completion_tokens)
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after.is_complete, after.error
        assert after.text == before.text
        assert after.completion_tokens == before.completion_tokens == 150
    assert amid.ended_ms < max(answer.ended_ms for answer in disturbed)
    assert scheduler_total(url)["preemptions"] >= 1


def replay(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program("superfluid"), "simulate", "replay", str(path)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_what_nodes_recorded_is_decided_again_in_the_same_way(recorded: RecordedFleet) -> None:
    bodies = [body_of(f"Describe quincunx {n}.", 12 + n) for n in range(2 * LANES)]
    answers = asyncio.run(ask_all(recorded.url, bodies, "agent"))
    assert all(answer.is_complete for answer in answers)
    for node, path in zip(recorded.nodes, recorded.recordings, strict=True):
        node.process.terminate()
        assert node.process.wait(timeout=20) == 0
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert "quincunx" not in path.read_text(encoding="utf-8")
        replayed = replay(path)
        assert replayed.returncode == 0, replayed.stderr
        assert "calls replayed" in replayed.stdout
        assert "no end" not in replayed.stdout


def test_one_box_keeps_a_lane_free_of_a_capped_class(box: Child) -> None:
    work = [body_of(f"Describe mill {n}.", 75) for n in range(2)]

    async def scenario() -> tuple[dict[str, Any], list[Answer], Answer]:
        running = asyncio.create_task(ask_all(box.url, work, "background"))
        await until(lambda: scheduler_total(box.url)["queued"]["background"] == 1)
        total = scheduler_total(box.url)
        agent = await ask(box.url, body_of("Hello.", 8), "agent")
        return total, await running, agent

    total, background, agent = asyncio.run(scenario())
    assert (total["lanes"], total["lanes_busy"]) == (2, 1)
    assert agent.is_complete, agent.error
    assert agent.ended_ms < min(answer.ended_ms for answer in background)
    assert [answer.completion_tokens for answer in background] == [75, 75]


def test_a_full_queue_is_429_and_says_truly_when_to_come_again(box: Child) -> None:
    plain = plain_body("One too many.", 4)

    async def scenario() -> tuple[httpx.Response, httpx.Response, list[Answer]]:
        # two in lanes, two behind them on the node, one in the head's queue
        work = [body_of("Count the steps.", 40)] * 5
        running = asyncio.create_task(ask_all(box.url, work, "agent"))
        await until(lambda: sum(get(f"{box.url}/scheduler/stats")["head"]["waiting"].values()))
        refused = await asyncio.to_thread(post, box.url, plain)
        await asyncio.sleep(float(refused.headers["retry-after"]))
        again = await asyncio.to_thread(post, box.url, plain)
        return refused, again, await running

    refused, again, answers = asyncio.run(scenario())
    assert refused.status_code == httpx.codes.TOO_MANY_REQUESTS
    assert refused.json()["error"]["code"] == "queue_full"
    assert 1 <= int(refused.headers["retry-after"]) <= 5
    assert again.status_code == httpx.codes.OK, again.text
    assert all(answer.is_complete for answer in answers)


def test_a_lane_of_ones_own_is_for_those_who_may(fleet: SmallFleet, box: Child) -> None:
    body = plain_body("Hello.", 4)
    refused = post(fleet.url, body, x_superfluid_batch_invariant="true")
    assert refused.status_code == httpx.codes.FORBIDDEN
    assert refused.json()["error"]["code"] == "batch_invariant_not_allowed"
    allowed = post(box.url, body, x_superfluid_batch_invariant="true")
    assert allowed.status_code == httpx.codes.OK, allowed.text
    assert allowed.json()["choices"] == post(box.url, body).json()["choices"]


def node_url(node: Child) -> str:
    return "http://" + hostport(node.ready["metrics"])


def test_the_head_shows_the_figures_that_nodes_show(fleet: SmallFleet) -> None:
    assert post(fleet.url, plain_body("Hello.", 4)).status_code == httpx.codes.OK
    together = get(f"{fleet.url}/scheduler/stats")
    assert set(together["nodes"]) == set(fleet.addresses)
    for name in fleet.addresses:
        own = get(f"{node_url(fleet.rig.named(name))}/scheduler/stats")
        through = get(f"{fleet.url}/v1/fleet/nodes/{name}/stats")
        assert own["scheduler"] == through["scheduler"] == together["nodes"][name]["scheduler"]
        assert own["metrics"].keys() == through["metrics"].keys()
    answered = sum(each["scheduler"]["output_tokens"] for each in together["nodes"].values())
    assert together["total"]["output_tokens"] == answered > 0


NODE = (*program("superfluid-noded"), "--listen", "127.0.0.1:0", "--insecure-no-auth", *MOCK)
HEAD = (*program("superfluid"), "serve", "demo", "--http", "127.0.0.1:0")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((*NODE, "--prefill-mode", "disaggregated"), "prefill-mode disaggregated"),
        ((*HEAD, "--engine", "mock", "--class-lanes", "background=9"), "background=9 is outside 1..8"),
        ((*HEAD, "--http-default-qos", "first"), "interactive, completion, agent, background"),
    ],
    ids=["a node", "the node of a head", "a head"],
)  # fmt: skip
def test_settings_that_cannot_work_end_a_program_with_2_and_their_reason(
    rig: Rig, command: tuple[str, ...], words: str
) -> None:
    child = rig.spawn("wrong", command)
    assert child.process.wait(timeout=30) == 2, child.log_text()
    assert words in child.log_text()
    assert "Traceback" not in child.log_text()
