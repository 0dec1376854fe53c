"""Keys, hosts, origins, request ids, unknown routes, operational routes, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from superfluid_core.errors import ConfigError
from superfluid_head.access.keys import KeyRing, Principal, check_key, read_key_file
from superfluid_head.api.gate import is_loopback, normalise
from superfluid_head.app import routes

KEY = "sk-abcdef123456"
RING = [(KEY, Principal("default", admin=True)), ("sk-other-7654321", Principal("other"))]
OPEN = ("/livez", "/readyz", "/health", "/ping")
PAGES = ("/", "/dashboard")
"""What a browser gets without a key holds no data (test_dashboard.py)."""


@pytest.fixture
def locked(make_bench: Any) -> Any:
    return make_bench(keys=KeyRing(RING))


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer   {KEY}"},
        {"x-api-key": KEY},
        {"authorization": "Bearer nonsense", "x-api-key": KEY},
    ],
)
def test_a_right_key_opens(locked: Any, headers: dict[str, str]) -> None:
    assert locked.send("GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong-key-000"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"x-api-key": KEY + "x"},
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
def test_without_a_right_key_everything_but_the_open_paths_is_401(
    locked: Any, headers: dict[str, Any]
) -> None:
    paths = [
        "/v1/models",
        "//v1//models/",
        "/nothing",
        "/metrics",
        "/version",
        "/livez/x",
        "/v1/health",
    ]
    for path in paths:
        response = locked.send("GET", path, headers=headers)
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["x-request-id"]
    for path in OPEN:
        assert locked.send("GET", path, headers=headers).status_code == 200


def test_every_route_is_guarded_unless_it_is_on_the_list(locked: Any) -> None:
    for verbs, path, _ in routes(locked.head):
        response = locked.send(verbs[0], path.replace("{name:path}", "x"))
        assert (response.status_code == 401) == (path not in (*OPEN, *PAGES)), path


def test_the_key_names_the_tenant(locked: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    for key, name in (("sk-other-7654321", "other"), (KEY, "default")):
        headers = {"authorization": f"Bearer {key}"}
        assert (
            locked.send("POST", "/v1/chat/completions", json=body, headers=headers).status_code
            == 200
        )
        assert locked.fleet.requests[-1].tenant == name
    salts = {request.cache_salt for request in locked.fleet.requests}
    assert len(salts) == 2


def test_keys_never_show() -> None:
    ring = KeyRing(RING)
    assert KEY not in repr(ring)
    assert not ring.is_empty
    with pytest.raises(ConfigError, match="equal"):
        KeyRing([RING[0], RING[0]])


def test_key_files_are_judged(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    assert read_key_file(file) == KEY
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="everyone"):
        read_key_file(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_key_file(tmp_path / "absent")
    with pytest.raises(ConfigError, match="regular"):
        read_key_file(tmp_path)
    for bad in ("short", "has a space in", "ümläut-key"):
        with pytest.raises(ConfigError) as caught:
            check_key(bad, "here")
        assert bad not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("/", "/"), ("", "/"), ("//v1///models/", "/v1/models"), ("/v1/models", "/v1/models")],
)
def test_paths_have_one_spelling(given: str, expected: str) -> None:
    assert normalise(given) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("example.com", False),
        ("localhost.example.com", False),
        ("127.0.0.1.example.com", False),
    ],
)
def test_loopback_names_are_recognised(name: str, expected: bool) -> None:
    assert is_loopback(name) is expected


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, "host_refused"),
        ({"host": "evil.example:80"}, "host_refused"),
        ({"origin": "https://evil.example"}, "origin_refused"),
        ({"origin": "null"}, "origin_refused"),
        ({"origin": "http://localhost.evil.example"}, "origin_refused"),
        ({"host": "localhost:8453"}, None),
        ({"host": "[::1]:8453"}, None),
        ({"origin": "http://localhost:3000"}, None),
        ({"origin": "http://127.0.0.1", "host": "127.0.0.1"}, None),
    ],
)
def test_a_loopback_listener_answers_only_this_machine(
    bench: Any, headers: dict[str, str], code: str | None
) -> None:
    for path in ("/v1/models", "/health"):
        response = bench.send("GET", path, headers=headers)
        if code is None:
            assert response.status_code == 200
        else:
            assert response.status_code == 403
            assert response.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("given", "is_echoed"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)],
)
def test_request_ids_are_echoed_when_short_and_visible(
    bench: Any, given: str, is_echoed: bool
) -> None:
    response = bench.send("GET", "/v1/models", headers={"x-request-id": given})
    assert (response.headers["x-request-id"] == given) is is_echoed
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("verb", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("GET", "/v1", 404, "unknown_url"),
        ("GET", "/docs", 404, "unknown_url"),
        ("GET", "/openapi.json", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/org/m", 405, "method_not_allowed"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
    ],
)
def test_unknown_routes_and_verbs_are_json_errors(
    bench: Any, verb: str, path: str, status: int, code: str
) -> None:
    response = bench.send(verb, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert ("allow" in response.headers) == (status == 405)


def test_models_are_listed_and_found_by_ids_with_slashes(bench: Any) -> None:
    listed = bench.send("GET", "/v1/models/").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/m"]
    card = listed["data"][0]
    assert (card["object"], card["created"], card["max_model_len"]) == (
        "model",
        1_700_000_000,
        4_096,
    )
    for path in ("/v1/models/org/m", "/v1/models/org%2Fm"):
        assert bench.send("GET", path).json() == card
    assert bench.send("HEAD", "/v1/models").status_code == 200
    assert bench.send("OPTIONS", "/v1/models").status_code == 204


def test_a_model_without_nodes_stays_listed(bench: Any) -> None:
    bench.fleet.served = []
    assert [card["id"] for card in bench.send("GET", "/v1/models").json()["data"]] == ["m"]


def test_health_follows_the_fleet(bench: Any) -> None:
    for path in ("/health", "/ping", "/readyz"):
        assert bench.send("GET", path).status_code == 200
    bench.fleet.served[0].text = "a tokenizer that is not here"
    assert bench.send("GET", "/readyz").status_code == 503
    bench.fleet.is_ready = False
    for path in ("/health", "/ping", "/readyz"):
        response = bench.send("GET", path)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_worker"
    assert bench.send("GET", "/livez").status_code == 200


def test_metrics_count_what_happened_with_bounded_labels(bench: Any) -> None:
    bench.chat()
    bench.chat(stream=True)
    bench.chat(model="nope")
    for index in range(300):
        bench.head.metrics.request_done(f"/made/up/{index}", 200, 0.1)
    text = bench.send("GET", "/metrics").text
    assert 'superfluid_head_requests_total{route="/v1/chat/completions",status="200"} 2.0' in text
    assert 'superfluid_head_requests_total{route="/v1/chat/completions",status="404"} 1.0' in text
    assert 'superfluid_head_tokens_total{kind="completion",model="org/m"} 6.0' in text
    assert (
        'superfluid_head_generations_total{class="agent",finish="stop",model="org/m"} 2.0' in text
    )
    assert 'superfluid_head_node_up{node="n1"} 1.0' in text
    assert "superfluid_head_ttft_seconds_count" in text
    assert "superfluid_head_inter_token_seconds_count" in text
    assert text.count('superfluid_head_requests_total{route="/made') < 130
    assert "nope" not in text


def test_the_version_is_told(bench: Any) -> None:
    assert bench.send("GET", "/version").json() == {"version": "9.9"}


def test_no_route_of_the_framework_is_left(bench: Any) -> None:
    inner = bench.app
    while not hasattr(inner, "routes"):
        inner = inner._app
    assert all(isinstance(route, APIRoute) for route in inner.routes)
