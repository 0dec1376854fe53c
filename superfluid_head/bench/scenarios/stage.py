"""Where a scenario plays: a server of its own in a rig, or one that somebody else started.

Owns how the two are made alike (`Stage`: a URL, a model, a key) and the asking of many requests at once, each class of them over
a client of its own because the class travels as a header.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx

from superfluid_core.clock import MS, Clock, SystemClock
from superfluid_head.bench.load import Answer, chat, http_client
from superfluid_head.bench.loops import run
from superfluid_head.bench.pages import page
from superfluid_head.bench.rig import Child, Rig, RigError
from superfluid_head.bench.scenarios.base import Plan
from superfluid_head.bench.small_fleet import Shape, SmallFleet, real_flags, wait_linked

QOS = "x-superfluid-qos"
INVARIANT = "x-superfluid-batch-invariant"
# A mock that decodes at the pace of a small model on a small GPU, and ends only when it is told to.
MOCK_RATES = "prefill=20000,decode=100"


@dataclass(slots=True)
class Stage:
    """A server to ask. `fleet` and `head` are there when it is our own."""

    url: str
    model: str
    api_key: str | None = None
    rig: Rig | None = None
    fleet: SmallFleet | None = None
    head: Child | None = None

    @property
    def clock(self) -> Clock:
        return SystemClock()


def engine_flags(
    plan: Plan, engine: str, nodes: int, *flags: str, rates: str = MOCK_RATES
) -> tuple[str, ...]:
    """Give the flags of a node of `plan`'s model, that many nodes sharing the machine."""
    if engine == "mock":
        kind: tuple[str, ...] = ("--engine", "mock", "--mock-rates", rates, "--mock-eos", "0")
    else:
        kind = real_flags(nodes, engine, plan.dtype)
    return (*kind, "--model", plan.model, *flags)


def own_fleet(
    stack: ExitStack, plan: Plan, flags: tuple[str, ...], nodes: int, shape: Shape | None = None
) -> Stage:
    """Start heads and nodes of our own."""
    rig = stack.enter_context(Rig())
    fleet = SmallFleet(rig, flags, plan.model, nodes, shape)
    return Stage(fleet.url, fleet.served, rig=rig, fleet=fleet, head=fleet.head)


def own_box(stack: ExitStack, plan: Plan, engine: str, *flags: str) -> Stage:
    """Start `superfluid serve MODEL`: a head that keeps a node on this machine; `flags` are the node's."""
    rig = stack.enter_context(Rig())
    head = start_box(rig, plan, engine, *flags)
    return Stage(head.url, served_name(head.url), rig=rig, head=head)


def start_box(rig: Rig, plan: Plan, engine: str, *flags: str, http: str = "127.0.0.1:0") -> Child:
    node = engine_flags(plan, engine, 1, *flags)
    model = node.index("--model")
    args = [f"--node-arg={each}" for each in (*node[:model], *node[model + 2 :])]
    head = rig.start_head(
        plan.model, *args, "--http-allow-batch-invariant", "--max-queue", "4096", http=http
    )
    rig.wait_ready(head)
    wait_linked(rig, head, 1)
    return head


def found(plan: Plan) -> Stage:
    """Use the server at the plan's base URL."""
    assert plan.base_url is not None
    url = plan.base_url.rstrip("/").removesuffix("/v1")
    return Stage(url, plan.model, plan.api_key)


def served_name(url: str) -> str:
    listed = page(f"{url}/v1/models").json()
    return str(listed["data"][0]["id"])


def client_of(
    stage: Stage, qos: str | None = None, *, is_invariant: bool = False
) -> httpx.AsyncClient:
    """Make a client whose requests are of one class."""
    client = http_client(2048, stage.api_key)
    if qos is not None:
        client.headers[QOS] = qos
    if is_invariant:
        client.headers[INVARIANT] = "true"
    return client


async def ask_all(
    client: httpx.AsyncClient, stage: Stage, bodies: Sequence[dict[str, Any]]
) -> list[Answer]:
    """Send every body at once; answers in their order."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(chat(client, stage.url, body, stage.clock)) for body in bodies]
    return [task.result() for task in tasks]


def ask(
    stage: Stage,
    bodies: Sequence[dict[str, Any]],
    qos: str | None = None,
    *,
    is_invariant: bool = False,
) -> list[Answer]:
    """Do the same from outside a loop."""

    async def asked() -> list[Answer]:
        async with client_of(stage, qos, is_invariant=is_invariant) as client:
            return await ask_all(client, stage, bodies)

    return run(asked())


async def stats(client: httpx.AsyncClient, stage: Stage) -> dict[str, Any]:
    """Sum what the nodes measure, as the head tells it, with the longest step that any of them predicts.

    Raises RigError where there is no such route.
    """
    try:
        reply = await client.get(f"{stage.url}/scheduler/stats", timeout=20)
        reply.raise_for_status()
        told = reply.json()
        total: dict[str, Any] = told["total"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise RigError(f"the server does not tell its lanes: {error}") from None
    nodes = [each["scheduler"] for each in told["nodes"].values() if "scheduler" in each]
    steps = [each["step_predicted_ns"] / MS for each in nodes]
    return {**total, "step_ms_max": max(steps, default=math.nan), "by_node": nodes}


async def placements(
    client: httpx.AsyncClient, stage: Stage, answers: Sequence[Answer]
) -> list[list[dict[str, Any]]]:
    """Ask the head where each answer was made and why; nothing for those that it has forgotten."""
    found: list[list[dict[str, Any]]] = []
    for answer in answers:
        reply = await client.get(f"{stage.url}/v1/fleet/requests/{answer.request_id}", timeout=20)
        records = reply.json()["placements"] if reply.status_code == httpx.codes.OK else []
        found.append(records)
    return found


async def fleet_state(client: httpx.AsyncClient, stage: Stage) -> dict[str, Any]:
    """Read GET /v1/fleet."""
    reply = await client.get(f"{stage.url}/v1/fleet", timeout=20)
    reply.raise_for_status()
    state: dict[str, Any] = reply.json()
    return state


def failures(answers: Sequence[Answer]) -> int:
    """Count whatever did not come whole; refusals too."""
    return sum(not answer.is_complete for answer in answers)


def is_typed(answer: Answer) -> bool:
    """Say whether it came whole, or the server said in its own words why not."""
    if answer.is_complete:
        return True
    error = answer.error or ""
    is_broken = error.startswith(("the stream ended", "RemoteProtocolError", "ReadError"))
    return bool(error) and not is_broken
