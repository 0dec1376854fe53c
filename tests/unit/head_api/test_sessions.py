"""The session routes: who sees what, classes that change in mid-answer, sessions that are ended by somebody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from superfluid_core.session import QosClass
from superfluid_head.access.keys import KeyRing, Principal
from tests.unit.head_api.conftest import Bench, chat_body

KEYS = {
    "admin-key": Principal("root", admin=True),
    "alice-key": Principal("alice"),
    "robert-key": Principal("bob", qos=QosClass.BACKGROUND, max_qos=QosClass.AGENT),
}


def slow_bench(make_bench: Any) -> Bench:
    bench: Bench = make_bench(keys=KeyRing(KEYS.items()))
    bench.fleet.say("a", "b", end=False, step_s=0.01)
    return bench


class Client:
    """Speaks to a bench with one key."""

    def __init__(self, bench: Bench, key: str) -> None:
        self._bench = bench
        self._headers = {"authorization": f"Bearer {key}"}

    async def send(self, method: str, path: str, **options: Any) -> Any:
        return await self._bench.asend(method, path, headers=self._headers, **options)

    async def chat(self, **members: Any) -> Any:
        body = chat_body(max_tokens=400, ignore_eos=True, **members)
        return await self.send("POST", "/v1/chat/completions", json=body)

    async def sessions(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = (await self.send("GET", "/v1/sessions")).json()["data"]
        return data

    async def one(self) -> dict[str, Any]:
        while not (found := await self.sessions()):  # noqa: ASYNC110 - polls over HTTP
            await asyncio.sleep(0.01)
        return found[0]


def during(bench: Bench, chats: list[Any], work: Callable[[], Awaitable[None]]) -> list[Any]:
    """Run `work` while the chats are being answered; returns the replies."""

    async def main() -> list[Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(chat) for chat in chats]
            await work()
        return [task.result() for task in tasks]

    replies = asyncio.run(main())
    assert not bench.head.sessions.visible(Principal("x", admin=True))
    return replies


def test_callers_see_their_own_and_admins_see_all(make_bench: Any) -> None:
    bench = slow_bench(make_bench)
    alice, bob, root = (Client(bench, key) for key in ("alice-key", "robert-key", "admin-key"))

    async def work() -> None:
        while [each["state"] for each in await root.sessions()] != ["running"] * 2:  # noqa: ASYNC110 - polls over HTTP
            await asyncio.sleep(0.01)
        mine = await alice.one()
        assert {each["tenant"] for each in await root.sessions()} == {"alice", "bob"}, (
            "sent at once"
        )
        assert mine["class"] == "agent"
        assert mine["prompt_tokens"] == 8
        assert mine["state"] == "running"
        assert mine["nodes"] == ["n1"]
        assert (await bob.one())["class"] == "background"
        path = f"/v1/sessions/{mine['id']}"
        assert (await alice.send("GET", path)).json()["request_id"] == mine["request_id"]
        for method, extra in (("GET", ""), ("DELETE", ""), ("POST", "/qos")):
            reply = await bob.send(method, path + extra, json={"class": "agent"})
            assert reply.status_code == 404
            assert reply.json()["error"]["code"] == "session_not_found"
        for each in await root.sessions():
            assert (await root.send("DELETE", f"/v1/sessions/{each['id']}")).status_code == 200

    during(bench, [alice.chat(), bob.chat()], work)


def test_a_cancelled_session_ends_with_its_code_and_is_not_retried(make_bench: Any) -> None:
    bench = slow_bench(make_bench)
    alice = Client(bench, "alice-key")

    async def work() -> None:
        session = await alice.one()
        reply = await alice.send("DELETE", f"/v1/sessions/{session['id']}")
        assert reply.json() == {"id": session["id"], "object": "session", "cancelled": True}

    (reply,) = during(bench, [alice.chat()], work)
    assert reply.status_code == 499
    assert reply.json()["error"]["code"] == "cancelled"
    assert bench.fleet.running == 0
    (reply,) = during(bench, [alice.chat(stream=True)], work)
    events = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1][6:])["error"]["code"] == "cancelled"
    assert bench.fleet.running == 0


def test_a_class_changes_in_mid_answer_for_every_choice_within_the_ceiling(make_bench: Any) -> None:
    bench = slow_bench(make_bench)
    bob = Client(bench, "robert-key")

    async def work() -> None:
        session = await bob.one()
        path = f"/v1/sessions/{session['id']}/qos"
        before = len(bench.fleet.classes)
        reply = await bob.send("POST", path, json={"class": "foreground"})
        assert reply.json()["class"] == "agent"
        assert bench.fleet.classes[before:] == [QosClass.AGENT] * 2
        too_good = await bob.send("POST", path, json={"class": "interactive"})
        assert (too_good.status_code, too_good.json()["error"]["code"]) == (
            403,
            "class_not_allowed",
        )
        for body in ({}, {"class": 1}, {"class": "vip"}):
            assert (await bob.send("POST", path, json=body)).status_code == 400
        assert (await bob.one())["class"] == "agent"
        await bob.send("DELETE", f"/v1/sessions/{session['id']}")

    during(bench, [bob.chat(n=2)], work)


def test_nobody_without_a_key_sees_sessions(make_bench: Any) -> None:
    bench = slow_bench(make_bench)
    assert bench.send("GET", "/v1/sessions").status_code == 401


def test_no_live_session_is_an_empty_list_and_an_unknown_one_is_404(bench: Bench) -> None:
    assert bench.send("GET", "/v1/sessions").json() == {"object": "list", "data": []}
    assert bench.send("GET", "/v1/sessions/chatcmpl-1").status_code == 404
