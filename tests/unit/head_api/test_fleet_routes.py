"""The fleet's admin routes over the scripted fleet, and the commands that use them, over a real socket."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from superfluid_core.errors import CapacityError
from superfluid_core.placement.policies import Compared, Score
from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.cli import run
from superfluid_head.fleet.chronicle import LISTENERS_MAX, PlacementRecord
from tests.unit.head_api.conftest import Bench

ROUTES = (
    ("GET", "/v1/fleet"), ("GET", "/v1/fleet/events"), ("GET", "/v1/fleet/requests/r"),
    ("POST", "/v1/fleet/nodes/n1/drain"), ("POST", "/v1/fleet/nodes/n1/undrain"),
)  # fmt: skip


def record(**scores: float | None) -> PlacementRecord:
    found = tuple(
        Score(name, "capable" if score is not None else "full", score, "lane wait 0.000 s")
        for name, score in scores.items()
    )
    compared = cast("Compared", SimpleNamespace(scores=lambda: found))
    return PlacementRecord(0, 1, "n2", "first", "load-aware", 12, {}, compared)


@pytest.fixture(autouse=True)
def no_key_of_the_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUPERFLUID_API_KEY", raising=False)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_fleet_is_for_admins(make_bench: Any, method: str, path: str) -> None:
    bench = make_bench(keys=KeyRing([("plain-key", Principal("alice"))]))
    assert bench.send(method, path).status_code == 401
    reply = bench.send(method, path, headers={"authorization": "Bearer plain-key"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_required")
    assert bench.fleet.drains == []


def test_the_fleet_is_shown_whole(bench: Bench) -> None:
    found = bench.send("GET", "/v1/fleet").json()
    assert (found["object"], found["ready"], found["policy"]) == ("fleet", True, "load-aware")
    assert [node["name"] for node in found["nodes"]] == ["n1"]
    assert found["waiting"] == [0, 1, 0, 0]


def test_why_shows_the_scores_best_first_and_404_for_the_unknown(bench: Bench) -> None:
    bench.fleet.placements["team/r 1"] = [record(n1=0.9, n3=None, n2=0.25)]
    found = bench.send("GET", "/v1/fleet/requests/team%2Fr%201").json()
    assert (found["object"], found["id"]) == ("fleet.request", "team/r 1")
    (placement,) = found["placements"]
    assert (placement["node"], placement["reason"], placement["waited_ms"]) == ("n2", "first", 12)
    assert placement["first_ms"] is None
    assert placement["scores"] == [
        "n2: 0.2500 lane wait 0.000 s", "n1: 0.9000 lane wait 0.000 s", "n3: full",
    ]  # fmt: skip
    reply = bench.send("GET", "/v1/fleet/requests/nobody")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "request_not_found")


def test_nodes_are_drained_with_and_without_a_grace_and_undrained(bench: Bench) -> None:
    path = "/v1/fleet/nodes/n1"
    assert bench.send("POST", f"{path}/drain").json() == {
        "object": "fleet.node", "id": "n1", "is_drained": True,
    }  # fmt: skip
    assert bench.send("POST", f"{path}/drain", json={}).is_success
    assert bench.send("POST", f"{path}/drain", json={"grace_ms": 0}).is_success
    assert bench.send("POST", f"{path}/drain", json={"grace_ms": 1_500}).is_success
    assert bench.fleet.drains == [("n1", None), ("n1", None), ("n1", 0), ("n1", 1_500)]
    assert bench.send("POST", f"{path}/undrain").json()["is_drained"] is False
    assert bench.fleet.drains == []


@pytest.mark.parametrize("grace", [-1, 86_400_001, "5", 1.5, True, [1]])
def test_a_grace_that_is_none_is_refused(bench: Bench, grace: Any) -> None:
    reply = bench.send("POST", "/v1/fleet/nodes/n1/drain", json={"grace_ms": grace})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "grace_ms")
    assert bench.fleet.drains == []


@pytest.mark.parametrize("verb", ["drain", "undrain"])
def test_a_node_that_is_not_there_is_404(bench: Bench, verb: str) -> None:
    reply = bench.send("POST", f"/v1/fleet/nodes/n9/{verb}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "node_not_found")
    assert bench.send("GET", f"/v1/fleet/nodes/n1/{verb}").status_code == 405


def read_events(live: Any, count: int, query: str = "", **headers: str) -> list[dict[str, Any]]:
    """Read the next `count` events; each is its data with its id and its name."""
    found: list[dict[str, Any]] = []
    with httpx.stream(
        "GET", f"{live.url}/v1/fleet/events{query}", headers=headers, timeout=10, trust_env=False
    ) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert next(lines) == ": listening"
        number = name = ""
        while len(found) < count:
            line = next(lines)
            number = line[4:] if line.startswith("id: ") else number
            name = line[7:] if line.startswith("event: ") else name
            if line.startswith("data: "):
                found.append({**json.loads(line[6:]), "id": number, "name": name})
    return found


def test_events_come_in_order_and_go_on_after_the_last_one_seen(live: Any) -> None:
    tell = live.bench.fleet.chronicle.tell
    for number in range(4):
        live.call(lambda number=number: tell("placed", node=f"n{number}", waited_ms=number))
    found = read_events(live, 4, "?since=0")
    assert [event["sequence"] for event in found] == [1, 2, 3, 4]
    assert [event["node"] for event in found] == ["n0", "n1", "n2", "n3"]
    assert {event["name"] for event in found} == {event["kind"] for event in found} == {"placed"}
    (third, fourth) = read_events(live, 2, **{"last-event-id": found[1]["id"]})
    assert (third, fourth) == (found[2], found[3])
    (last,) = read_events(live, 1, "?since=3")
    assert last["sequence"] == 4
    assert len(read_events(live, 4, **{"last-event-id": "1-3"})) == 4, "of another process"


def test_events_begin_now_when_nobody_says_since_when(live: Any) -> None:
    chronicle = live.bench.fleet.chronicle
    live.call(lambda: chronicle.tell("old"))
    with httpx.stream("GET", f"{live.url}/v1/fleet/events", timeout=10, trust_env=False) as reply:
        lines = reply.iter_lines()
        assert next(lines) == ": listening"
        assert httpx.post(f"{live.url}/v1/fleet/nodes/n1/drain", trust_env=False).is_success
        event = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
    assert (event["kind"], event["node"], event["sequence"]) == ("drain", "n1", 2)


def test_silence_is_filled_with_comments_and_the_end_of_the_head_ends_the_stream(
    make_bench: Any, serve: Any
) -> None:
    from superfluid_core.limits import HttpLimits

    with serve(make_bench(limits=HttpLimits(silence_ms=50))) as live:
        url = f"{live.url}/v1/fleet/events"
        with httpx.stream("GET", url, timeout=10, trust_env=False) as reply:
            lines = reply.iter_lines()
            assert [next(lines) for _ in range(4)] == [": listening", "", ": ping", ""]
            live.call(live.bench.head.inflight.drain)
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize("since", ["x", "-1", "1-2-3", "9" * 40, "٣"])
def test_an_event_number_that_is_none_is_refused(bench: Bench, since: str) -> None:
    reply = bench.send("GET", "/v1/fleet/events", params={"since": since})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "since")


def test_too_many_listeners_are_turned_away_and_those_who_left_make_room(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    chronicle = live.bench.fleet.chronicle
    with contextlib.ExitStack() as stack:
        for _ in range(LISTENERS_MAX):
            stack.enter_context(chronicle.listen())
        reply = httpx.get(f"{live.url}/v1/fleet/events", timeout=10, trust_env=False)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
        with pytest.raises(CapacityError), chronicle.listen():
            pass
    live.call(lambda: chronicle.tell("placed"))
    assert len(read_events(live, 1, "?since=0")) == 1


def test_the_status_is_a_table(live: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", "status", "--url", live.url]) == 0
    title, row, totals = capsys.readouterr().out.splitlines()
    assert title.split()[:3] == ["NODE", "STATE", "LANES"]
    assert title.split()[7:] == ["LINK", "KEY", "AGE", "REKEYS", "ADDRESS", "MODELS"]
    assert row.split()[:7] == ["n1", "up", "3/4", "2", "5", "7/100", "closed"]
    assert row.split()[7:] == ["joined", "x2", "7f3a91c2", "2h", "1", "10.0.0.1:8454", "org/m"]
    figures = "9 placements, 1 moves, 0 faults; 2 joins, 1 rekeys, 3 links refused"
    assert totals == f"6 running, 1 waiting; {figures}"
    assert run(["fleet", "status", "--json", "--url", live.url]) == 0
    assert json.loads(capsys.readouterr().out)["ready"] is True


def test_a_fleet_that_serves_nothing_is_shown_and_ends_with_1(
    live: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    live.bench.fleet.is_ready = False
    assert run(["fleet", "status", "--url", live.url]) == 1
    shown = capsys.readouterr()
    assert "n1: refused" in shown.out
    assert "no model can be served" in shown.err


def test_nodes_are_drained_from_the_command_line(
    live: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = live.bench.fleet
    assert run(["fleet", "drain", "--url", live.url, "--grace-ms", "250", "n1"]) == 0
    assert fleet.drains == [("n1", 250)]
    assert run(["fleet", "undrain", "--url", live.url, "n1"]) == 0
    assert fleet.drains == []
    assert run(["fleet", "drain", "--url", live.url, "n1"]) == 0
    assert fleet.drains == [("n1", None)]
    capsys.readouterr()
    assert run(["fleet", "drain", "--url", live.url, "n/9"]) == 1
    assert "no node is called 'n/9'; there are: n1" in capsys.readouterr().err
    assert run(["fleet", "drain", "--url", live.url, ".."]) == 2
    assert run(["fleet", "drain", "--url", live.url, "--grace-ms", "-1", "n1"]) == 2


def test_why_prints_what_was_compared(live: Any, capsys: pytest.CaptureFixture[str]) -> None:
    live.bench.fleet.placements["team/r?1"] = [record(n1=0.9, n2=0.25)]
    assert run(["fleet", "why", "--url", live.url, "team/r?1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "choice 0, epoch 1: n2 (first, load-aware, waited 12 ms)",
        "    n2: 0.2500 lane wait 0.000 s",
        "    n1: 0.9000 lane wait 0.000 s",
    ]
    assert run(["fleet", "why", "--url", live.url, "nobody"]) == 1
    assert "remembers no placement of 'nobody'" in capsys.readouterr().err


def test_commands_send_their_key_and_say_why_they_were_refused(
    make_bench: Any, serve: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [("admin-key-1234567", Principal("root", admin=True)), ("plain-key-1234567", Principal("alice"))]  # fmt: skip
    with serve(make_bench(keys=KeyRing(keys))) as live:
        assert run(["fleet", "status", "--url", live.url]) == 1
        assert "refused with 401" in capsys.readouterr().err
        monkeypatch.setenv("SUPERFLUID_API_KEY", "plain-key-1234567")
        assert run(["fleet", "drain", "--url", live.url, "n1"]) == 1
        shown = capsys.readouterr()
        assert "refused with 403: this needs an admin key" in shown.err
        assert "plain-key" not in shown.out + shown.err
        monkeypatch.setenv("SUPERFLUID_API_KEY", "admin-key-1234567")
        assert run(["fleet", "drain", "--url", live.url, "n1"]) == 0


@pytest.mark.parametrize(
    ("url", "status"),
    [("http://127.0.0.1:1", 1), ("nonsense", 2), ("http://[::1", 2), ("ftp://box", 2)],
)
@pytest.mark.parametrize("command", [["fleet", "status"], ["chat", "hi"]])
def test_a_head_that_is_not_there_is_one_line(
    command: list[str], url: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--url", url]) == status
    shown = capsys.readouterr()
    assert url in shown.err
    assert len(shown.err.splitlines()) == 1
