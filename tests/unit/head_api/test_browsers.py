"""Browsers: preflights, listed origins, and errors that pages may read (http_api G10, case O-08)."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.access.rules import AccessRules
from tests.unit.head_api.conftest import chat_body

KEY, APP = "sk-abcdef123456", "https://app.example"
KEYS = KeyRing([(KEY, Principal("one", admin=True))])
ASKED = "authorization,content-type,x-stainless-lang"
PREFLIGHT = {
    "origin": APP, "access-control-request-method": "POST", "access-control-request-headers": ASKED,
}  # fmt: skip


@pytest.fixture
def browsed(make_bench: Any) -> Any:
    return make_bench(keys=KEYS, access=AccessRules(origins=(APP,)))


def test_o08_a_preflight_needs_no_key_and_its_errors_can_be_read(browsed: Any) -> None:
    reply = browsed.send("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert reply.status_code == 204
    assert reply.headers["access-control-allow-origin"] == APP
    assert "POST" in reply.headers["access-control-allow-methods"]
    allowed = {name.strip() for name in reply.headers["access-control-allow-headers"].split(",")}
    assert {"authorization", "content-type", "x-api-key", "x-stainless-lang"} <= allowed
    assert int(reply.headers["access-control-max-age"]) > 0
    assert "access-control-allow-credentials" not in reply.headers
    refused = browsed.send(
        "POST", "/v1/chat/completions", json=chat_body(), headers={"origin": APP}
    )
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == APP
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    assert refused.headers["vary"] == "origin"


def test_every_kind_of_reply_to_a_listed_page_can_be_read(browsed: Any) -> None:
    headers = {"origin": APP, "authorization": f"Bearer {KEY}"}
    sent: list[tuple[str, str, dict[str, Any], int]] = [
        ("GET", "/nowhere", {}, 404), ("GET", "/v1/completions", {}, 405), ("GET", "/v1/models", {}, 200),
        ("POST", "/v1/chat/completions", {"json": chat_body(max_tokens=2)}, 200),
        ("POST", "/v1/chat/completions", {"json": chat_body(max_tokens=2, stream=True)}, 200),
        ("POST", "/v1/chat/completions", {"json": chat_body(model="nope")}, 404),
        ("POST", "/v1/chat/completions", {"content": b"{"}, 400),
    ]  # fmt: skip
    for verb, path, body, status in sent:
        reply = browsed.send(verb, path, headers=headers, **body)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, APP)

    def crash() -> Any:
        raise RuntimeError("inside")

    browsed.head.fleet.health = crash
    reply = browsed.send("GET", "/metrics", headers=headers)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (500, APP)


@pytest.mark.parametrize("origin", ["https://evil.example", "https://app.example.evil", "null", "http://app.example", "https://[", "https://[::1", "x" * 400, "\u00e9"])  # fmt: skip
def test_other_pages_are_refused_and_told_nothing(browsed: Any, origin: str) -> None:
    for verb in ("OPTIONS", "GET", "POST"):
        headers = {**PREFLIGHT, "origin": origin, "authorization": f"Bearer {KEY}"}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        reply = browsed.send(verb, "/v1/models", headers=raw)
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "origin_refused"
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_a_page_of_this_head_needs_no_listing(browsed: Any) -> None:
    headers = {"authorization": f"Bearer {KEY}", "origin": "http://127.0.0.1:8453"}
    assert browsed.send("GET", "/v1/models", headers=headers).is_success


def test_all_pages_may_be_listed_and_still_none_without_a_key(make_bench: Any) -> None:
    bench = make_bench(keys=KEYS, access=AccessRules(origins=("*",)))
    headers = {"origin": "https://any.example"}
    reply = bench.send("GET", "/v1/models", headers=headers)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (401, "*")
    private = {**PREFLIGHT, "access-control-request-private-network": "true"}
    reply = bench.send("OPTIONS", "/v1/models", headers=private)
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in reply.headers


def test_what_a_preflight_asks_for_is_not_taken_over_blindly(browsed: Any) -> None:
    for asked in (b"x-a\xff", b"a" * 3_000, b"x-a; evil", b'x"y'):
        raw = [(n.encode(), v.encode()) for n, v in PREFLIGHT.items() if "headers" not in n]
        raw.append((b"access-control-request-headers", asked))
        reply = browsed.send("OPTIONS", "/v1/models", headers=raw)
        assert reply.status_code == 204
        assert "evil" not in reply.headers["access-control-allow-headers"]
        assert len(reply.headers["access-control-allow-headers"]) < 200


def test_options_that_are_no_preflight_are_answered_as_before(make_bench: Any) -> None:
    bench = make_bench(keys=KEYS)
    reply = bench.send("OPTIONS", "/v1/models")
    assert (reply.status_code, reply.headers["allow"].count("GET")) == (204, 1)

    async def elsewhere() -> httpx.Response:
        transport = httpx.ASGITransport(app=bench.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://rebound.example:8453"
        ) as c:
            return await c.options("/v1/models")

    assert asyncio.run(elsewhere()).status_code in (204, 403)
