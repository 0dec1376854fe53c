"""What strangers try on the HTTP side (reliability T-S 4 to 8, 10 and T-D 8): keys, hosts, ids, other people's caches, storms."""

from __future__ import annotations

import asyncio
import dis
import hashlib
import hmac
import random
import re
import socket
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from math import exp, sqrt
from types import FrameType
from typing import Any

import pytest

from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.api.errors import from_error
from superfluid_head.app import routes
from tests.unit.head_api.conftest import chat_body
from tests.unit.head_api.test_through import Path, standing

KEY, OTHER_KEY = "sk-abcdef123456", "sk-other-7654321"
RING = KeyRing([(KEY, Principal("one", admin=True)), (OTHER_KEY, Principal("two"))])
OPEN = {"/livez", "/readyz", "/health", "/ping", "/", "/dashboard"}
HOSTILE_KEYS = (
    "", "x", KEY[:-1], KEY + "x", KEY.upper(), "' OR '1'='1", "\\0", "*", "../../etc/passwd", "sk-" + "a" * 500,
)  # fmt: skip


def authorised(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- keys (T-S4, T-S5) ----------------------------------------------------------------------------


@pytest.mark.slow
def test_every_route_and_verb_needs_a_right_key(make_bench: Any) -> None:
    bench = make_bench(keys=RING)
    tried = 0
    for verbs, path, _ in routes(bench.head):
        spelled = re.sub(r"\{[^}]*\}", "x", path)
        for verb in verbs:
            answers = {bench.send(verb, spelled).status_code}
            answers |= {
                bench.send(verb, spelled, headers=authorised(k)).status_code for k in HOSTILE_KEYS
            }
            assert (answers == {401}) == (path not in OPEN), (verb, path, answers)
            if path != "/v1/fleet/events":
                assert bench.send(verb, spelled, headers=authorised(KEY)).status_code != 401
            tried += 1
    assert tried > 20


def work_of(ring: KeyRing, secret: bytes) -> list[str]:
    """Everything that is executed to judge a key: each instruction of Python, and each call into C by name.

    It is what takes the time, and it is the same on a machine that is busy. What stays unseen is inside functions of C, so those
    that compare have to be the one that is made for it.
    """
    work: list[str] = []

    def step(frame: FrameType, event: str, _argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            work.append(f"{frame.f_code.co_name} {frame.f_lasti}")
        return step

    def call(_frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            work.append(function.__name__)

    traced, profiled = sys.gettrace(), sys.getprofile()
    sys.settrace(step)
    sys.setprofile(call)
    try:
        ring.find(secret)
    finally:
        sys.setprofile(profiled)
        sys.settrace(traced)
    return work


NEAR, FAR = KEY[:-1].encode() + b"7", b"zz-zzzzzzzzzzzz"


def test_the_time_of_a_wrong_key_does_not_tell_how_wrong_it_is() -> None:
    near, far = work_of(RING, NEAR), work_of(RING, FAR)
    assert near == far
    assert near.count(hmac.compare_digest.__name__) == 2
    # whole digests are compared, not keys: how much of those agrees nobody can choose
    assert near.count(hashlib.sha256.__name__) == 1
    assert "COMPARE_OP" not in {step.opname for step in dis.get_instructions(KeyRing.find)}


def test_the_count_finds_a_comparison_that_stops_early() -> None:
    class Leaking(KeyRing):
        def find(self, secret: bytes) -> Principal | None:
            for given, known in zip(secret, KEY.encode(), strict=False):
                if given != known:
                    return None
            return None

    assert len(work_of(Leaking(), NEAR)) > len(work_of(Leaking(), FAR))


# --- hosts (T-S6, T-S11) --------------------------------------------------------------------------


def hosts() -> list[bytes]:
    draw = random.Random(5)
    alphabet = b"abc/.:@%?#[]-_ \\127\x80\xff"
    made = [bytes(draw.choice(alphabet) for _ in range(draw.randrange(1, 24))) for _ in range(60)]
    known = [
        b"evil.example", b"127.0.0.1.evil.example", b"localhost@evil.example", b"evil.example/livez",
        b"livez", b"/livez?", b"127.0.0.1/health#", b"[::1", b"0x7f000001.evil", b"localhost:1:2",
    ]  # fmt: skip
    return known + made


def test_no_host_header_opens_a_route_or_moves_the_path(make_bench: Any) -> None:
    bench = make_bench(keys=RING)

    async def send() -> list[int]:
        found = []
        for host in hosts():
            for key in ({}, authorised(OTHER_KEY)):
                reply = await bench.asend("GET", "/v1/fleet", headers={"host": host, **key})
                found.append(reply.status_code)
        return found

    codes = asyncio.run(send())
    assert set(codes) <= {400, 401, 403}
    assert codes.count(403) > 60


def test_a_rebound_name_gets_nothing_from_a_loopback_listener(live: Any) -> None:
    for path in ("/v1/models", "/metrics", "/v1/fleet", "/livez"):
        with socket.create_connection(("127.0.0.1", live.port), timeout=5) as one:
            one.sendall(
                f"GET {path} HTTP/1.1\r\nHost: rebound.example:{live.port}\r\n\r\n".encode()
            )
            assert one.recv(200).startswith(b"HTTP/1.1 403"), path


# --- nothing is fetched (I30 and the SSRF rows) ---------------------------------------------------

URL = "http://127.0.0.1:9/latest/meta-data"


@pytest.mark.parametrize(
    "members",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": URL}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": "file:///etc/passwd"}}]}]},
        {"messages": [{"role": "user", "content": f"fetch {URL}"}], "api_base": URL, "base_url": URL},
        {"metadata": {"api_base": URL, "litellm_params": URL}},
        {"model": URL}, {"model": "../../../etc/passwd"}, {"model": "file:///etc/passwd"},
        {"chat_template": "{% for x in range(9) %}{% endfor %}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"logits_processors": ["os.system"]}, {"custom_logit_processor": "gASV"},
        {"prompt_embeds": "AAAA"}, {"mm_processor_kwargs": {"x": 1}}, {"kv_transfer_params": {"host": URL}},
        {"guided_decoding_backend": "x", "cache_salt": "a"},
    ],
)  # fmt: skip
def test_no_request_makes_the_head_open_a_connection_or_a_file(
    bench: Any, monkeypatch: pytest.MonkeyPatch, members: dict[str, Any]
) -> None:
    tried: list[str] = []

    def refuse(name: str) -> Any:
        def call(*arguments: Any, **_: Any) -> Any:
            tried.append(f"{name} {arguments[1:2]}")
            raise OSError("blocked")

        return call

    bench.chat()  # whatever is imported or made lazily is there now
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse(name))
    for name in ("getaddrinfo", "create_connection", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse(name))
    monkeypatch.setattr("builtins.open", refuse("open"))
    reply = bench.chat(**members)
    assert not tried
    assert reply.status_code in (200, 400, 404), reply.text


@pytest.mark.parametrize("member", ["chat_template", "chat_template_kwargs"])
def test_templates_in_requests_are_refused_on_every_route(bench: Any, member: str) -> None:
    """Every route that takes a body, so that none is forgotten; kwargs may hold plain scalars, never a template."""
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    hostile = {
        "chat_template": loop,
        "chat_template_kwargs": {"chat_template": loop, "messages": []},
    }
    tried = []
    for verbs, path, _ in routes(bench.head):
        if "POST" not in verbs:
            continue
        began = time.monotonic()
        spelled = re.sub(r"\{[^}]*\}", "x", path)
        body = {**chat_body(), "prompt": "x", "input": "x", member: hostile[member]}
        reply = bench.send("POST", spelled, json=body)
        # without a template there are no arguments for one: an unknown member like any other
        has_template = member == "chat_template" or "chat" in path
        allowed = (400, 404) if has_template else (200, 400, 404)
        assert reply.status_code in allowed, (path, reply.text)
        assert time.monotonic() - began < 5
        tried.append(path)
    assert "/v1/chat/completions" in tried
    assert bench.chat(**{member: hostile[member]}).status_code == 400


@pytest.mark.parametrize(
    "salt", ["a" * 1_000, "\x00", "\u202e", "' ; --", "\U0001f600", "../", "=", " "]
)
def test_any_cache_salt_is_only_a_salt(bench: Any, salt: str) -> None:
    reply = bench.chat(cache_salt=salt)
    assert reply.status_code in (200, 400), reply.text
    for request in bench.fleet.requests:
        assert len(request.cache_salt) <= 32
        assert salt.encode("utf-8", "surrogatepass") not in request.cache_salt
    assert bench.chat().status_code == 200


SMUGGLED = b"GET /v1/fleet HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 46\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n1\nZ\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0x1\r\nZ\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 1e1\r\n\r\n",
        b"Content-Length: +0\r\n\r\n",
    ],
)
def test_chunks_and_lengths_that_disagree_smuggle_nothing(live: Any, head: bytes) -> None:
    """At most one answer comes back, and it is a refusal: the second request was never seen as one."""
    host = f"Host: 127.0.0.1:{live.port}\r\nContent-Type: application/json\r\n".encode()
    with socket.create_connection(("127.0.0.1", live.port), timeout=2) as one:
        one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + host + head + SMUGGLED)
        received = bytearray()
        try:
            while data := one.recv(65_536):
                received += data
        except (TimeoutError, ConnectionResetError):
            pass
    answers = re.findall(rb"HTTP/1\.1 (\d{3})", bytes(received))
    assert b"200" not in answers, received[:300]
    assert len(answers) <= 1, received[:600]


# --- error texts (T-S10) --------------------------------------------------------------------------

LEAKS = re.compile(
    r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}|0x[0-9a-f]{6,}|/(etc|usr|home|tmp|var)/|Traceback|\.py\b|sk-"
)
INSIDE = "node at 10.1.2.3:8454 said: /var/lib/some/model 0x7f3a91c2aa"
# Made by the head itself from what the caller sent, so its words are the caller's own.
OUR_OWN_WORDS = {
    ErrorCode.INVALID_REQUEST, ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.MODEL_NOT_FOUND,
    ErrorCode.TEMPLATE_ERROR, ErrorCode.UNSUPPORTED, ErrorCode.DEADLINE_EXCEEDED,
}  # fmt: skip


def test_failures_of_the_inside_are_told_in_fixed_words() -> None:
    for code in (
        ErrorCode.NODE_LOST, ErrorCode.FENCED, ErrorCode.MOVES_EXHAUSTED, ErrorCode.PROTOCOL_ERROR,
        ErrorCode.UNAUTHORIZED, ErrorCode.FINGERPRINT_MISMATCH, ErrorCode.LANE_FAULT, ErrorCode.NAN_LOGITS,
        ErrorCode.CONFIG, ErrorCode.MODEL_FILES, ErrorCode.INTERNAL,
    ):  # fmt: skip
        error = SuperfluidError(INSIDE)
        error.code = code
        assert not LEAKS.search(from_error(error).message), code


def test_no_refusal_shows_an_address_a_path_or_a_traceback(bench: Any, make_bench: Any) -> None:
    bodies: list[dict[str, Any]] = [
        {"model": "/etc/passwd"}, {"temperature": "x"}, {"messages": []}, {"n": 10**9},
        {"logit_bias": {"99999": 1}}, {"tools": 5}, {"response_format": {"type": "zip"}},
    ]  # fmt: skip
    texts = [bench.chat(**body).text.replace("/etc/passwd", "") for body in bodies]
    texts += [bench.raw_chat(data).text for data in (b"{", b"[1]", b"\xff", b'{"a":1e400}')]
    texts += [bench.send("GET", "/nothing").text, bench.send("PUT", "/v1/models").text]
    texts += [make_bench(keys=RING).send("GET", "/v1/models", headers=authorised("sk-wrong1")).text]
    bench.fleet.generate = lambda request: 1 / 0
    texts.append(bench.chat().text)
    assert len(texts) == 15
    assert [text for text in texts if LEAKS.search(text)] == []
    assert "internal error" in texts[-1]


# --- ids (T-S8) -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_request_ids_of_two_callers_never_meet(make_bench: Any) -> None:
    bench = make_bench(keys=RING)
    bench.fleet.say("mine", step_s=1.0)
    same = {"x-request-id": "req-00000000"}

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            one, two = (
                group.create_task(
                    bench.asend(
                        "POST", "/v1/chat/completions", json=chat_body(),
                        headers={**same, **authorised(key)},
                    )
                )
                for key in (KEY, OTHER_KEY)
            )  # fmt: skip
            sessions: list[Any] = []
            while len(sessions) < 2:
                await asyncio.sleep(0.02)
                listed = await bench.asend("GET", "/v1/sessions", headers=authorised(KEY))
                sessions = listed.json()["data"]
            assert len({each["id"] for each in sessions}) == 2
            theirs = next(each["id"] for each in sessions if each["tenant"] == "one")
            for guess in (theirs, theirs[:-1], theirs[:4], "req-00000000", "%", "*"):
                path = f"/v1/sessions/{guess}"
                reply = await bench.asend("DELETE", path, headers=authorised(OTHER_KEY))
                assert reply.status_code == 404, guess
        assert one.result().json()["id"] != two.result().json()["id"]
        assert [t.result().status_code for t in (one, two)] == [200, 200]

    asyncio.run(both())


def test_nobody_reads_the_responses_of_another_caller(make_bench: Any) -> None:
    """Whether they are kept or not: another key, a part of the id and a guess all get nothing."""
    bench = make_bench(keys=RING)
    made = bench.send("POST", "/v1/responses", json={"input": "hi"}, headers=authorised(KEY))
    name = str(made.json().get("id", "resp_0"))
    for guess in (name, name[:-1], name[:8], "*", "%"):
        for verb, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            path = f"/v1/responses/{guess}{tail}"
            reply = bench.send(verb, path, headers=authorised(OTHER_KEY))
            assert reply.status_code in (400, 403, 404, 405, 501), (verb, path, reply.text)
            assert "output" not in reply.json()


# --- other people's caches (T-S7) -----------------------------------------------------------------


def ks_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sample Kolmogorov-Smirnov: the chance of such a distance if both come from one distribution."""
    first, second = sorted(a), sorted(b)
    distance = max(
        abs(bisect_right(first, x) / len(first) - bisect_right(second, x) / len(second))
        for x in (*first, *second)
    )
    effective = sqrt(len(first) * len(second) / (len(first) + len(second)))
    scale = (effective + 0.12 + 0.11 / effective) * distance
    total = sum((-1) ** (k - 1) * exp(-2 * k * k * scale * scale) for k in range(1, 100))
    return min(1.0, max(0.0, 2 * total)) if scale > 0.2 else 1.0


async def first_token_ms(path: Path, text: str, key: str) -> tuple[float, int]:
    began = time.perf_counter()
    reply = await path.bench.asend(
        "POST", "/v1/chat/completions", headers=authorised(key),
        json=chat_body(model="m", messages=[{"role": "user", "content": text}], max_tokens=1),
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return 1000 * (time.perf_counter() - began), cached


async def probe_prefixes(path: Path, rounds: int) -> tuple[list[float], list[float], list[int]]:
    """Tenant two asks for prompts that tenant one has warmed, and for prompts that nobody has."""
    warmed, cold, cached = [], [], []
    for number in range(rounds):
        secret = f"{number:06d} " + "the secret of tenant one " * 8
        _, _ = await first_token_ms(path, secret, KEY)
        _, own = await first_token_ms(path, secret, KEY)
        assert own > 0, "the cache works for its own tenant"
        ms, hit = await first_token_ms(path, secret, OTHER_KEY)
        warmed.append(ms)
        cached.append(hit)
        other = f"{number:06d} " + "a secret of nobody else  " * 8
        ms, _ = await first_token_ms(path, other, OTHER_KEY)
        cold.append(ms)
    return warmed, cold, cached


@pytest.mark.slow
def test_the_first_token_does_not_tell_what_another_tenant_has_cached(make_bench: Any) -> None:
    from superfluid_core.limits import FleetLimits

    async def probe() -> tuple[list[float], list[float], list[int]]:
        async with standing(make_bench, FleetLimits(), {"keys": RING}, {}) as path:
            return await probe_prefixes(path, 20)

    warmed, cold, cached = asyncio.run(asyncio.wait_for(probe(), 50))
    assert cached == [0] * 20
    assert ks_p(warmed, cold) > 0.01


def test_the_statistics_find_a_shared_cache() -> None:
    draw = random.Random(1)
    cold = [10 + draw.random() for _ in range(200)]
    warm = [10.3 + draw.random() for _ in range(200)]
    assert ks_p(cold, warm) < 0.01 < ks_p(cold, [10 + draw.random() for _ in range(200)])


# --- storms (T-D8) --------------------------------------------------------------------------------


@pytest.mark.slow
def test_clients_that_connect_send_and_close_leave_nothing_behind(live: Any) -> None:
    live.bench.fleet.say("never read", step_s=0.01, end=False)
    data = b'{"model":"org/m","messages":[{"role":"user","content":"x"}],"max_tokens":500,"stream":true}'
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{live.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    ).encode()
    for number in range(150):
        with socket.create_connection(("127.0.0.1", live.port), timeout=5) as one:
            one.sendall((head + data)[: len(head + data) - number % 3 * 20])
    admin, deadline, still = Principal("x", admin=True), time.monotonic() + 60, 0
    left = (-1, -1, -1)
    while still < 5 and time.monotonic() < deadline:  # some may yet be on their way to the fleet
        time.sleep(0.05)
        left = (
            live.bench.fleet.running,
            live.bench.head.inflight.count,
            len(live.bench.head.sessions.visible(admin)),
        )
        still = still + 1 if left == (0, 0, 0) else 0
    assert still == 5, left
    live.bench.fleet.say("still here")
    assert live.bench.chat(max_tokens=3).status_code == 200
