"""How a head tells whoever watches it: the state with its rates, and the same in the stream of events, as often as asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.vitals import SLOT_S
from tests.unit.head_api.conftest import Bench, chat_body


@pytest.fixture(autouse=True)
def no_key_of_the_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUPERFLUID_API_KEY", raising=False)


def told(reply: httpx.Response) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield id, name and data of each event."""
    number = name = ""
    for line in reply.iter_lines():
        number = line[4:] if line.startswith("id: ") else number
        name = line[7:] if line.startswith("event: ") else name
        if line.startswith("data: {"):
            yield number, name, json.loads(line[6:])
            number = name = ""


def watching(live: Any, query: str = "?every_ms=250") -> Any:
    return httpx.stream("GET", f"{live.url}/v1/fleet/events{query}", timeout=30, trust_env=False)


def test_the_state_has_the_rates_that_readers_see(bench: Bench) -> None:
    assert bench.chat().status_code == 200
    found = bench.send("GET", "/v1/fleet").json()
    assert found["classes"] == ["interactive", "completion", "agent", "background"]
    vitals = found["vitals"]
    assert vitals["ttft_ms"]["count"] == 1
    assert vitals["itl_ms"]["count"] == 2
    assert vitals["tokens_per_s"] > 0
    (node,) = found["nodes"]
    assert node["tokens_per_s"] == vitals["tokens_per_s"]
    assert (node["queued_by_class"], node["blocks_cached"]) == ([0, 0, 0, 0], 0)
    assert found["head"]["version"] == "9.9"
    assert found["head"]["is_draining"] is False


def test_a_watcher_hears_the_state_at_once_and_again_and_events_between(live: Any) -> None:
    bench = live.bench
    with watching(live) as reply:
        events = told(reply)
        number, name, first = next(events)
        assert (number, name, first["object"]) == ("", "state", "fleet")
        assert (first["sessions"], first["sessions_total"], first["slot_s"]) == ([], 0, SLOT_S)
        live.call(lambda: bench.fleet.chronicle.tell("moved", request="r", node="n1"))
        seen = [next(events) for _ in range(3)]
    names = [name for _, name, _ in seen]
    assert names.count("moved") == 1
    assert names.count("state") == 2
    assert all(bool(number) == (name == "moved") for number, name, _ in seen)


def test_a_watcher_sees_sessions_and_only_what_grew_of_the_charts(live: Any) -> None:
    live.bench.fleet.say(*["a"] * 2_000, step_s=0.02)  # as long as a slow machine may need
    body = {**chat_body(), "stream": True}
    with httpx.stream(
        "POST", f"{live.url}/v1/chat/completions", json=body, timeout=30, trust_env=False
    ) as chat:
        lines = chat.iter_lines()
        next(lines)
        with watching(live) as reply:
            events = told(reply)
            states = [next(events)[2] for _ in range(2)]
    (session,) = states[0]["sessions"]
    assert (session["class"], session["state"], session["nodes"]) == ("agent", "running", ["n1"])
    assert states[0]["points"][-1]["ttft_ms"]["count"] == 1
    assert len(states[1]["points"]) <= 2


def test_without_being_asked_no_state_is_told(live: Any) -> None:
    with watching(live, "?since=0") as reply:
        live.call(lambda: live.bench.fleet.chronicle.tell("first"))
        assert next(told(reply))[1] == "first"


@pytest.mark.parametrize("value", ["0", "249", "60001", "1e3", "-5", "abc", "٣٠٠", "9" * 9])
def test_how_often_is_a_number_within_bounds(bench: Bench, value: str) -> None:
    reply = bench.send("GET", f"/v1/fleet/events?every_ms={value}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "every_ms")


def test_the_state_is_for_admins(make_bench: Any) -> None:
    bench = make_bench(keys=KeyRing([("plain-key", Principal("alice"))]))
    reply = bench.send(
        "GET", "/v1/fleet/events?every_ms=1000", headers={"authorization": "Bearer plain-key"}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_required")
