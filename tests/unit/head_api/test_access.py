"""What keys may do, on every route of the table: no key, a wrong one, a right one, another model's, another tenant's."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from superfluid_core.session import QosClass
from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.access.quotas import Quotas
from superfluid_head.access.rules import AccessRules
from superfluid_head.api.sessions import LiveSession
from superfluid_head.app import routes
from tests.unit.head_api.conftest import EOS, WINDOW, Bench, chat_body

ROOT, NARROW, ALICE = "sk-root-1234567", "sk-narrow-12345", "sk-alice-123456"
RING = KeyRing(
    [
        (ROOT, Principal("root", admin=True)),
        (NARROW, Principal("narrow", models=frozenset({"other/model"}))),
        (ALICE, Principal("alice")),
    ]
)
ROOT_CALLER = Principal("root", admin=True)
OPEN = {"/livez", "/readyz", "/health", "/ping"}
MESSAGES = [{"role": "user", "content": "hi"}]
# What may be a body that runs, of any route that takes a model: one of them has to fit each.
BODIES: list[dict[str, Any]] = [
    {"model": "org/m", "messages": MESSAGES, "max_tokens": 3},
    {"model": "org/m", "messages": MESSAGES, "max_tokens": 3, "stream": False},
    {"model": "org/m", "messages": MESSAGES},
    {"model": "org/m", "prompt": "hi", "max_tokens": 3},
    {"model": "org/m", "prompt": "hi", "stream": False},
    {"model": "org/m", "input": "hi"},
    {"model": "org/m", "tokens": [104, 105]},
    {"model": "org/m"},
]
WITHOUT_MODEL = {
    "/v1/sessions/{session}/qos", "/v1/fleet/nodes/{node:path}/drain", "/v1/fleet/nodes/{node:path}/undrain",
    "/v1/responses/{response}/cancel",
}  # fmt: skip
# Routes whose models are of another kind than the bench's: there it is enough that the key's refusal comes first.
EMBEDDING = {"/v1/embeddings", "/api/embed", "/api/embeddings"}
ADMIN_ONLY = ("/v1/fleet", "/v1/prefixes", "/scheduler/stats")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def table(bench: Bench) -> Iterator[tuple[str, str]]:
    for verbs, path, _ in routes(bench.head):
        for verb in verbs:
            yield verb, path


def spelled(path: str, value: str = "x") -> str:
    return re.sub(r"\{[^}]*\}", value, path)


@pytest.fixture
def bench(make_bench: Any) -> Bench:
    made: Bench = make_bench(keys=RING)
    other = SimpleNamespace(
        name="other/model", window=WINDOW, is_up=True, text="fake-text", eos_ids=(EOS,)
    )
    made.fleet.served.append(other)
    return made


def code_of(reply: httpx.Response) -> Any:
    error = reply.json().get("error", {})
    return error.get("code") if isinstance(error, dict) else error


def test_a_key_of_another_model_gets_nothing_of_this_one_on_any_route_that_takes_a_model(
    bench: Bench,
) -> None:
    async def send() -> int:
        tried = 0
        for verb, path in table(bench):
            if verb != "POST" or path in WITHOUT_MODEL:
                continue
            fits = []
            for body in BODIES:
                reply = await bench.asend("POST", path, json=body, headers=bearer(ROOT))
                fits += [body] if reply.status_code == 200 else []
            if path in EMBEDDING and not fits:
                fits = [body for body in BODIES if "input" in body]
            assert fits, f"no body of BODIES runs at {path}: add one"
            ran = len(bench.fleet.requests)
            for body in BODIES:
                reply = await bench.asend("POST", path, json=body, headers=bearer(NARROW))
                assert reply.status_code in (400, 403), (path, body, reply.text)
                if body in fits:
                    assert reply.status_code == 403, (path, body, reply.text)
                    assert "model" in reply.text or "admin" in reply.text
                    if path in EMBEDDING:
                        continue
                    own = {**body, "model": "other/model"}
                    reply = await bench.asend("POST", path, json=own, headers=bearer(NARROW))
                    assert reply.status_code == (403 if path in ADMIN_ONLY else 200), reply.text
            assert all(r.model == "other/model" for r in bench.fleet.requests[ran:])
            tried += 1
        return tried

    assert asyncio.run(send()) >= 6


def test_nothing_that_can_be_read_names_a_model_to_a_key_without_it(bench: Bench) -> None:
    for verb, path in table(bench):
        if verb != "GET" or path == "/v1/fleet/events":
            continue
        for value in ("x", "org/m", "org%2Fm"):
            reply = bench.send("GET", spelled(path, value), headers=bearer(NARROW))
            is_listed = "org/m" in reply.text.replace("key may not use the model 'org/m'", "")
            assert not is_listed, (path, reply.text)
    assert (
        code_of(bench.send("GET", "/v1/models/org/m", headers=bearer(NARROW)))
        == "model_not_allowed"
    )
    assert bench.send("GET", "/v1/models/org/m", headers=bearer(ALICE)).is_success
    listed = bench.send("GET", "/v1/models", headers=bearer(NARROW)).json()["data"]
    assert [card["id"] for card in listed] == ["other/model"]


def test_debug_headers_say_where_an_answer_ended(make_bench: Any) -> None:
    reply = make_bench(debug_headers=True).chat()
    assert (reply.headers["x-superfluid-node"], reply.headers["x-superfluid-moves"]) == ("n1", "0")
    assert "x-superfluid-node" not in make_bench().chat().headers


def test_an_unnamed_model_is_the_only_one_that_the_key_has(bench: Bench) -> None:
    body = chat_body(max_tokens=2)
    del body["model"]
    reply = bench.send("POST", "/v1/chat/completions", json=body, headers=bearer(NARROW))
    assert reply.json()["model"] == "other/model"
    reply = bench.send("POST", "/v1/chat/completions", json=body, headers=bearer(ALICE))
    assert reply.status_code == 400
    assert bench.send("GET", "/readyz", headers=bearer(NARROW)).is_success


def test_another_tenants_session_is_seen_and_touched_on_no_route(bench: Bench) -> None:
    session = LiveSession(
        id="chatcmpl-of-alice", request_id="r-of-alice", model="org/m", tenant="alice", qos=QosClass.AGENT,
        batch_invariant=False, prompt_tokens=1, created_s=0, is_streamed=True, completion_tokens=lambda: 0,
        cancel=lambda: pytest.fail("cancelled by a stranger"),
    )  # fmt: skip
    bench.head.metrics.tokens(("org/m", "alice"), prompt=5, cached=1, completion=7)
    bench.head.metrics.tokens(("org/m", "narrow"), prompt=3, cached=1, completion=2)
    with bench.head.sessions.enter(session):
        for verb, path in table(bench):
            if path == "/v1/fleet/events":
                continue
            for key in (NARROW, None):
                headers = {} if key is None else bearer(key)
                body = {"json": {"class": "background"}} if verb == "POST" else {}
                where = spelled(path, "chatcmpl-of-alice")
                reply = bench.send(verb, where, headers=headers, **body)
                assert "alice" not in reply.text.replace("chatcmpl-of-alice", ""), (verb, path)
                if "{session}" in path:
                    assert reply.status_code == (401 if key is None else 404)
        assert session.qos is QosClass.AGENT
        mine = bench.send("GET", "/v1/sessions", headers=bearer(ALICE)).json()["data"]
        assert [one["id"] for one in mine] == ["chatcmpl-of-alice"]


def test_metrics_show_admins_all_and_others_their_own_rows(bench: Bench) -> None:
    for key, count in ((ALICE, 2), (NARROW, 1)):
        for _ in range(count):
            bench.send("GET", "/v1/models", headers=bearer(key))
    bench.head.metrics.tokens(("org/m", "alice"), prompt=5, cached=1, completion=7)
    rows = bench.send("GET", "/metrics", headers=bearer(ALICE)).text
    shown = [line for line in rows.splitlines() if not line.startswith("#")]
    assert 'superfluid_head_tenant_requests_total{status="200",tenant="alice"} 2.0' in rows
    assert 'superfluid_head_tenant_tokens_total{kind="completion",tenant="alice"} 7.0' in rows
    assert all('tenant="alice"' in line for line in shown)
    everything = bench.send("GET", "/metrics", headers=bearer(ROOT)).text
    assert 'tenant="narrow"' in everything
    assert "superfluid_head_requests_total" in everything


def test_admin_routes_are_for_admins(bench: Bench) -> None:
    seen = 0
    for verb, path in table(bench):
        if path.startswith(ADMIN_ONLY) and verb != "HEAD":
            body = {"json": {"prompt": "x", "model": "org/m"}} if verb == "POST" else {}
            reply = bench.send(verb, spelled(path), headers=bearer(ALICE), **body)
            assert code_of(reply) == "admin_required", (verb, path)
            seen += 1
    assert seen >= 8


# --- limits ---------------------------------------------------------------------------------------


async def from_address(
    bench: Bench, address: str, path: str = "/v1/models", **headers: str
) -> httpx.Response:
    transport = httpx.ASGITransport(app=bench.app, client=(address, 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8453") as client:
        return await client.get(path, headers={k.replace("_", "-"): v for k, v in headers.items()})


def test_an_address_has_a_rate_and_a_key_with_its_own_is_not_held_to_it(make_bench: Any) -> None:
    keys = KeyRing(
        [
            ("sk-plain-key-1", Principal("plain")),
            ("sk-paced-key-1", Principal("paced", rate_limit_rpm=6)),
        ]
    )
    bench = make_bench(keys=keys, access=AccessRules(rate_limit_rpm=3))

    async def send(address: str, key: str) -> tuple[int, Any, str | None]:
        reply = await from_address(bench, address, x_api_key=key)
        return reply.status_code, code_of(reply), reply.headers.get("retry-after")

    async def all_of_it() -> None:
        for _ in range(3):
            assert (await send("203.0.113.9", "sk-plain-key-1"))[0] == 200
        assert await send("203.0.113.9", "sk-plain-key-1") == (429, "rate_limit_exceeded", "20")
        assert (await send("203.0.113.10", "sk-plain-key-1"))[0] == 200
        for _ in range(6):
            assert (await send("203.0.113.9", "sk-paced-key-1"))[0] == 200
        assert await send("203.0.113.99", "sk-paced-key-1") == (429, "rate_limit_exceeded", "10")
        for path in sorted(OPEN):
            assert (await from_address(bench, "203.0.113.9", path)).is_success

    asyncio.run(all_of_it())


def test_a_trusted_proxys_clients_are_counted_one_by_one(make_bench: Any) -> None:
    from ipaddress import ip_network

    bench = make_bench(access=AccessRules(rate_limit_rpm=1, proxies=(ip_network("10.0.0.0/8"),)))

    async def send(peer: str, client: str) -> int:
        return (await from_address(bench, peer, x_forwarded_for=client)).status_code

    async def all_of_it() -> list[int]:
        return [
            await send("10.0.0.1", "203.0.113.1"), await send("10.0.0.1", "203.0.113.2"),
            await send("10.0.0.2", "203.0.113.1"), await send("203.0.113.1", "203.0.113.7"),
            await send("10.0.0.1", "6.6.6.6, 203.0.113.2"),
        ]  # fmt: skip

    assert asyncio.run(all_of_it()) == [200, 200, 429, 429, 429]


def test_an_address_that_guesses_keys_is_refused_and_this_machine_is_not(bench: Bench) -> None:
    async def all_of_it() -> None:
        for _ in range(10):
            assert (await from_address(bench, "203.0.113.9", x_api_key="wrong")).status_code == 401
        refused = await from_address(bench, "203.0.113.9", x_api_key="wrong")
        assert (refused.status_code, code_of(refused)) == (429, "rate_limit_exceeded")
        right = await from_address(bench, "203.0.113.9", x_api_key=ALICE)
        assert right.status_code == 429, "else guessing would go on"
        assert (await from_address(bench, "203.0.113.9")).status_code == 401
        assert (await from_address(bench, "203.0.113.10", x_api_key=ALICE)).is_success
        for _ in range(20):
            assert (await from_address(bench, "127.0.0.1", x_api_key="wrong")).status_code == 401
        assert (await from_address(bench, "127.0.0.1", x_api_key=ALICE)).is_success

    asyncio.run(all_of_it())


def keyed(make_bench: Any, principal: Principal) -> tuple[Bench, dict[str, str]]:
    return make_bench(keys=KeyRing([(ALICE, principal)])), bearer(ALICE)


async def until(claim: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if claim():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never happened")


def test_tokens_a_minute_are_charged_as_they_are_used(make_bench: Any) -> None:
    bench, headers = keyed(make_bench, Principal("alice", tokens_per_minute=20))
    bench.fleet.say("x", step_s=0.005, end=False)

    async def all_of_it() -> None:
        async def send() -> httpx.Response:
            body = chat_body(max_tokens=40)
            return await bench.asend("POST", "/v1/chat/completions", json=body, headers=headers)

        async with asyncio.TaskGroup() as group:
            first = group.create_task(send())
            live = bench.head.sessions
            await until(lambda: any(s.completion_tokens() >= 15 for s in live.visible(ROOT_CALLER)))
            refused = await send()
            assert not first.done()
        assert first.result().status_code == 200, "nobody is cut off"
        assert (refused.status_code, code_of(refused)) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 120

    asyncio.run(all_of_it())


def test_slots_are_held_to_the_end_of_the_reply_and_choices_count(make_bench: Any) -> None:
    bench, headers = keyed(make_bench, Principal("alice", max_concurrent=2))
    bench.fleet.say("x", step_s=0.01, end=False)

    async def send(**members: Any) -> httpx.Response:
        body = chat_body(**members)
        return await bench.asend("POST", "/v1/chat/completions", json=body, headers=headers)

    async def all_of_it() -> None:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(send(max_tokens=40, stream=n == 0)) for n in range(2)]
            await until(lambda: bench.head.quotas.in_flight("alice") == 2)
            refused = await send()
            assert (refused.status_code, code_of(refused)) == (429, "concurrency_limit_exceeded")
            assert "x-should-retry" not in refused.headers
            assert (await bench.asend("GET", "/v1/sessions", headers=headers)).is_success
        assert all(task.result().status_code == 200 for task in running)
        assert (await send(n=2, max_tokens=1)).status_code == 200
        for stream in (False, True):
            never = await send(n=3, max_tokens=1, stream=stream)
            assert (never.status_code, never.headers["x-should-retry"]) == (429, "false")
        assert bench.head.quotas.in_flight("alice") == 0

    asyncio.run(all_of_it())


def scope_of(path: str) -> dict[str, Any]:
    headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {ALICE}".encode())]
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8453), "scheme": "http", "http_version": "1.1",
        "root_path": "",
    }  # fmt: skip


async def abort(bench: Bench, number: int) -> None:
    """Send a request and leave: before the body, in it, behind it, or after some of the answer; every third by being cancelled."""
    body = json.dumps(chat_body(stream=number % 2 == 0, max_tokens=50, n=1 + number % 3)).encode()
    stage, gone, taken = number % 5, asyncio.Event(), 0
    parts = [{"type": "http.request", "body": body[:40], "more_body": True}] if stage else []
    parts += [{"type": "http.request", "body": body[40:], "more_body": False}] if stage > 1 else []

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop(0)
        if stage > 2:
            await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal taken
        taken += 1
        if taken >= stage:
            gone.set()

    task = asyncio.ensure_future(bench.app(scope_of("/v1/chat/completions"), receive, send))
    await asyncio.sleep(0.001 * (number % 7))
    if stage > 2:
        gone.set()
    if number % 3 == 0:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
def test_a_thousand_aborted_requests_leave_every_slot_free(make_bench: Any) -> None:
    bench, headers = keyed(make_bench, Principal("alice", max_concurrent=30))
    bench.fleet.say("x", step_s=0.001, end=False)
    quotas: Quotas = bench.head.quotas

    async def all_of_it() -> None:
        for start in range(0, 1_000, 25):
            await asyncio.gather(*(abort(bench, number) for number in range(start, start + 25)))
        assert quotas.in_flight("alice") == 0
        assert (bench.head.inflight.count, bench.fleet.running) == (0, 0)
        bench.fleet.say("still here")
        body = chat_body(n=30)
        reply = await bench.asend("POST", "/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200

    asyncio.run(all_of_it())
