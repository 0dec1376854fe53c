"""From HTTP through a head and a real link to a real node and back: classes, gates, pins, figures, second models."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.limits import FleetLimits
from superfluid_core.session import QosClass
from superfluid_head.access.ratelimit import RateLimit
from superfluid_head.api.qos import QosDesk, QosRules
from superfluid_head.fleet.fleet import Fleet, FleetOptions, NodeAddress
from tests.unit.head_api.conftest import Bench, chat_body
from tests.unit.noded.conftest import KEYS, NodeRig, serving

RULES = QosRules(may_be_alone=True, completions=RateLimit(1_000, 1_000), completion_deadline_ms=400)


class Path:
    """A bench whose fleet is a real one over one real node."""

    def __init__(self, bench: Bench, fleet: Fleet, rig: NodeRig, tasks: asyncio.TaskGroup) -> None:
        self.bench = bench
        self.fleet = fleet
        self.rig = rig
        self.tasks = tasks

    async def send(self, method: str, path: str, **options: Any) -> Any:
        return await self.bench.asend(method, path, **options)

    async def chat(self, qos: str = "agent", alone: bool = False, **members: Any) -> Any:
        body = chat_body(model="m", ignore_eos=True, **members)
        headers = {"x-superfluid-qos": qos}
        if alone:
            headers["x-superfluid-batch-invariant"] = "true"
        return await self.send("POST", "/v1/chat/completions", json=body, headers=headers)

    def start(self, *arguments: Any, **members: Any) -> asyncio.Task[Any]:
        return self.tasks.create_task(self.chat(*arguments, **members))

    async def until(self, condition: Callable[[], Any]) -> None:
        await self.rig.until(condition)

    @property
    def stats(self) -> Any:
        return self.rig.node.scheduler.stats()


@asynccontextmanager
async def standing(
    make_bench: Any, limits: FleetLimits, head: dict[str, Any], node: dict[str, Any]
) -> AsyncIterator[Path]:
    async with serving(text_fingerprint="fake-text", **node) as rig, asyncio.TaskGroup() as group:
        bench: Bench = make_bench(qos=QosDesk(RULES), **head)
        address = NodeAddress("127.0.0.1", rig.port, "n1")
        options = FleetOptions((address,), "head-1", KEYS, fleet_limits=limits)
        fleet = Fleet(options, SystemClock(), random.Random(7))
        object.__setattr__(bench.head, "fleet", fleet)
        running = group.create_task(fleet.run())
        try:
            assert await fleet.wait_ready(10)
            async with asyncio.TaskGroup() as chats:
                yield Path(bench, fleet, rig, chats)
        finally:
            running.cancel()


@pytest.fixture
def through(make_bench: Any) -> Any:
    """Run a scenario on such a path."""

    def run(
        scenario: Callable[[Path], Awaitable[None]],
        *,
        limits: FleetLimits | None = None,
        head: dict[str, Any] | None = None,
        **node: Any,
    ) -> None:
        async def main() -> None:
            async with standing(make_bench, limits or FleetLimits(), head or {}, node) as path:
                await scenario(path)

        asyncio.run(asyncio.wait_for(main(), 40))

    return run


def live_classes(path: Path) -> list[QosClass]:
    return [view.qos for view in path.rig.node.scheduler.sessions()]


def test_class_tenant_and_solitude_reach_the_scheduler(through: Any) -> None:
    async def scenario(path: Path) -> None:
        chats = [
            path.start("background", max_tokens=30),
            path.start("0", alone=True, max_tokens=30),
        ]
        await path.until(lambda: len(live_classes(path)) == 2)
        views = path.rig.node.scheduler.sessions()
        assert {view.qos for view in views} == {QosClass.BACKGROUND, QosClass.INTERACTIVE}
        assert {view.tenant for view in views} == {"anonymous"}
        specs = [session.spec for session in path.rig.node.scheduler._state.sessions.values()]
        assert sorted(spec.batch_invariant for spec in specs) == [False, True]
        assert [(await chat).status_code for chat in chats] == [200, 200]

    through(scenario, decode_rate=100.0)


@pytest.mark.parametrize(
    "flags", [{}, {"park": True, "park_bytes": "8MiB", "preempt_mode": "swap"}]
)
def test_an_interactive_chat_preempts_and_nothing_of_the_victim_is_lost(
    through: Any, flags: dict[str, Any]
) -> None:
    async def scenario(path: Path) -> None:
        quiet = (await path.chat(max_tokens=60, seed=3)).json()
        chats = [path.start(max_tokens=60, seed=seed) for seed in (3, 4)]
        await path.until(lambda: path.stats.lanes_busy == 2)
        first = await path.chat("interactive", max_tokens=2)
        assert first.status_code == 200
        assert path.stats.preempted_for_class == 1
        assert path.stats.swapped_for_class == ("park" in flags)
        replies = [(await chat).json() for chat in chats]
        assert replies[0]["choices"] == quiet["choices"]
        assert [reply["usage"]["completion_tokens"] for reply in replies] == [60, 60]

    through(scenario, lanes=2, decode_rate=200.0, flags=flags)


def test_a_session_is_reclassed_on_its_node_and_cancelled_there(through: Any) -> None:
    async def scenario(path: Path) -> None:
        chat = path.start("background", max_tokens=3_000)
        await path.until(lambda: path.stats.output_tokens > 3)
        (session,) = (await path.send("GET", "/v1/sessions")).json()["data"]
        assert session["class"] == "background"
        url = f"/v1/sessions/{session['id']}"
        await path.send("POST", f"{url}/qos", json={"class": "interactive"})
        await path.until(lambda: live_classes(path) == [QosClass.INTERACTIVE])
        while not (await path.send("GET", url)).json()["completion_tokens"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # its first ids may stand for no text
        await path.send("DELETE", url)
        assert (await chat).status_code == 499
        await path.until(lambda: live_classes(path) == [])

    through(scenario, decode_rate=200.0)


def test_a_class_cap_of_the_node_holds_through_the_head(through: Any) -> None:
    async def scenario(path: Path) -> None:
        chats = [path.start("background", max_tokens=40) for _ in range(3)]
        await path.until(lambda: path.stats.held_class > 0)
        assert path.stats.lanes_busy == 1
        assert (await path.chat("agent", max_tokens=2)).status_code == 200
        assert [(await chat).status_code for chat in chats] == [200] * 3

    through(scenario, decode_rate=400.0, flags={"class_lanes": "background=1"})


def test_a_slow_node_that_promises_a_first_token_refuses_with_a_hint(through: Any) -> None:
    async def scenario(path: Path) -> None:
        assert (await path.chat(max_tokens=20)).status_code == 200
        chats = [path.start(max_tokens=20)]
        await path.until(lambda: path.stats.lanes_busy == 1)
        refused = await path.chat(max_tokens=20)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "slo_unattainable"
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert "x-should-retry" not in refused.headers
        assert (await chats[0]).status_code == 200
        # after the hint the same request is taken
        assert (await path.chat(max_tokens=2)).status_code == 200

    through(scenario, lanes=1, decode_rate=40.0, flags={"ttft_slo_ms": "100"})


def test_the_heads_own_queue_is_bounded_and_says_when_to_come_again(through: Any) -> None:
    async def scenario(path: Path) -> None:
        assert (await path.chat(max_tokens=40)).status_code == 200
        chats = [path.start(max_tokens=40) for _ in range(2)]
        await path.until(lambda: path.fleet.health().waiting == 1)
        refused = await path.chat(max_tokens=40)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 4
        assert [(await chat).status_code for chat in chats] == [200, 200]

    limits = FleetLimits(queue_max=1, sessions_over_lanes=0)
    through(scenario, limits=limits, lanes=1, decode_rate=80.0)


def test_what_the_pool_can_never_hold_is_400_without_an_invitation(through: Any) -> None:
    async def scenario(path: Path) -> None:
        for stream in (False, True):
            text = [{"role": "user", "content": "x" * 300}]
            refused = await path.chat(messages=text, max_tokens=4, stream=stream)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            assert "retry-after" not in refused.headers
        assert path.stats.rejected == 2
        assert (await path.chat(max_tokens=4)).status_code == 200

    through(scenario, blocks=16)


def test_a_completion_that_cannot_start_in_time_is_dropped(through: Any) -> None:
    async def scenario(path: Path) -> None:
        chat = path.start("interactive", max_tokens=60)
        await path.until(lambda: path.stats.lanes_busy == 1)
        late = await path.chat("completion", max_tokens=4)
        assert late.status_code == 408
        assert late.json()["error"]["code"] == "deadline_exceeded"
        assert not chat.done()
        assert (await chat).status_code == 200
        assert (await path.chat("completion", max_tokens=4)).status_code == 200

    through(scenario, lanes=1, decode_rate=60.0)


@pytest.mark.parametrize("scope", ["tenant", "shared"])
def test_a_pinned_prefix_stays_warm_while_others_are_pushed_out(through: Any, scope: str) -> None:
    system = {"role": "system", "content": "Be brief. " * 12}

    async def scenario(path: Path) -> None:
        pinned = await path.send(
            "POST", "/v1/prefixes", json={"model": "m", "messages": [system], "ttl_s": 60}
        )
        assert pinned.status_code == 200, pinned.text
        made = pinned.json()
        assert made["pinned_tokens"] // 16 == path.rig.node.pins[0].blocks > 5
        for number in range(8):
            other = [{"role": "user", "content": f"{number}" * 300}]
            await path.chat(messages=other, max_tokens=2)
        question = [system, {"role": "user", "content": "Why?"}]
        reply = await path.chat(messages=question, max_tokens=2)
        assert int(reply.headers["x-superfluid-warm"]) == made["pinned_tokens"]
        figures = (await path.send("GET", "/v1/fleet/nodes/n1/stats")).json()
        assert figures["pins"]["m"]["blocks"] == path.rig.node.pins[0].blocks
        await path.send("DELETE", f"/v1/prefixes/{made['id']}")
        await path.until(lambda: path.rig.node.pins[0].blocks == 0)

    through(
        scenario,
        head={"prefix_shared": scope == "shared"},
        blocks=64,
        flags={"prefix_scope": scope},
    )


def test_a_pin_beyond_the_budget_is_refused_whole(through: Any) -> None:
    async def scenario(path: Path) -> None:
        giant = await path.send("POST", "/v1/prefixes", json={"model": "m", "prompt": "g" * 200})
        assert giant.status_code == 400
        kept = await path.send(
            "POST", "/v1/prefixes", json={"model": "m", "prompt": "a" * 80, "ttl_s": 30}
        )
        assert kept.status_code == 200
        second = await path.send("POST", "/v1/prefixes", json={"model": "m", "prompt": "b" * 80})
        assert second.status_code == 503
        assert 1 <= int(second.headers["retry-after"]) <= 30
        await path.until(lambda: path.rig.node.pins[0].blocks == 5)
        tiny = await path.send("POST", "/v1/prefixes", json={"model": "m", "prompt": "abc"})
        assert tiny.status_code == 400

    through(scenario, blocks=32, flags={"pin_budget_pct": "25"})


def test_all_documented_figures_come_through_the_head(through: Any) -> None:
    names = [
        "queue_depth", "lanes", "prefill_budget_tokens", "decode_grant_tokens", "tick_seconds_count",
        "step_seconds_count", "plan_seconds_count", "kv_blocks", "kv_reserved_tokens",
        "kv_admit_blocked_total", "preemptions_total", "recompute_ratio", "prefix_hit_tokens_total",
        "prefix_miss_tokens_total", "prefix_evicted_blocks_total", "park_bytes", "ttft_seconds_count",
        "itl_seconds_count", "queue_wait_seconds_count", "tenant_tokens_total", "sessions_total",
    ]  # fmt: skip

    async def scenario(path: Path) -> None:
        await path.chat(max_tokens=4)
        figures = (await path.send("GET", "/scheduler/stats")).json()
        assert figures["total"]["lanes"] == 4
        found = figures["nodes"]["n1"]
        missing = [name for name in names if f"superfluid_{name}" not in found["metrics"]]
        assert not missing
        assert found["scheduler"]["output_tokens"] == 4
        text = path.rig.node.metrics.expose().decode()
        assert not [name for name in names if f"\nsuperfluid_{name}" not in text]

    through(scenario)


def test_a_prefix_of_the_second_model_is_pinned_in_its_own_cache_and_its_completions_are_served(
    through: Any,
) -> None:
    """All lanes of the main model are busy meanwhile."""

    async def scenario(path: Path) -> None:
        chats = [path.start(max_tokens=60) for _ in range(4)]
        await path.until(lambda: path.stats.lanes_busy == 4)
        made = await path.send(
            "POST", "/v1/prefixes", json={"model": "fim", "prompt": "f" * 80, "ttl_s": 30}
        )
        assert made.status_code == 200, made.text
        main, fim = path.rig.node.pins
        assert (main.blocks, fim.blocks) == (0, made.json()["pinned_tokens"] // 16)
        (node,) = path.fleet.health().nodes
        assert (node.lanes, node.sessions) == (6, 4)
        await path.send("DELETE", f"/v1/prefixes/{made.json()['id']}")
        await path.until(lambda: fim.blocks == 0)
        assert {(await chat).status_code for chat in chats} == {200}

    fim = {"lanes": 2, "window": 256, "blocks": 64, "text_fingerprint": "fake-text"}
    through(scenario, fim=fim, decode_rate=100.0)


def test_a_second_model_is_listed_by_the_head(through: Any) -> None:
    async def scenario(path: Path) -> None:
        models = (await path.send("GET", "/v1/models")).json()["data"]
        assert {model["id"] for model in models} >= {"m", "alias", "fim"}

    fim = {"lanes": 2, "window": 256, "blocks": 64, "text_fingerprint": "fake-text"}
    through(scenario, fim=fim)
