"""Several heads as one: what is summed and what is not, who is asked, when a dead one is started again, what is refused."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from superfluid_core.clock import MS, SECOND
from superfluid_core.errors import ConfigError
from superfluid_core.limits import HttpLimits, WorkerLimits
from superfluid_core.options import merge as merge_settings
from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.config import OPTIONS, HeadConfig, Surroundings, build_config
from superfluid_head.listeners import bound, open_sockets, reserve_sockets
from superfluid_head.metrics import HeadMetrics
from superfluid_head.vitals import Vitals
from superfluid_head.workers import merge
from superfluid_head.workers.children import Child
from superfluid_head.workers.place import Place
from superfluid_head.workers.siblings import Answered, Siblings

PAGE = """# HELP a_total Things.
# TYPE a_total counter
a_total{x="1"} 2.0
# HELP s_seconds Times.
# TYPE s_seconds histogram
s_seconds_bucket{le="1.0"} 3.0
s_seconds_sum 0.5
# HELP superfluid_head_node_up Up.
# TYPE superfluid_head_node_up gauge
superfluid_head_node_up{node="n"} 1.0
# HELP superfluid_head_queue_depth Waiting.
# TYPE superfluid_head_queue_depth gauge
superfluid_head_queue_depth{class="agent"} 4.0
# HELP superfluid_head_workers Heads.
# TYPE superfluid_head_workers gauge
superfluid_head_workers 1.0
"""


def test_counts_are_summed_and_gauges_of_what_all_see_are_not() -> None:
    other = PAGE.replace('a_total{x="1"} 2.0', 'a_total{x="1"} 5.0\na_total{x="2"} 1.0')
    rows = dict(
        line.rsplit(" ", 1)
        for line in merge.metrics([PAGE, other]).splitlines()
        if not line.startswith("#")
    )
    assert rows == {
        'a_total{x="1"}': "7.0",
        'a_total{x="2"}': "1.0",
        's_seconds_bucket{le="1.0"}': "6.0",
        "s_seconds_sum": "1.0",
        'superfluid_head_node_up{node="n"}': "1.0",
        'superfluid_head_queue_depth{class="agent"}': "8.0",
        "superfluid_head_workers": "2.0",
    }
    assert merge.metrics([PAGE, other]).count("# TYPE a_total counter") == 1


def test_a_fleet_is_one_with_every_head_told_apart() -> None:
    own = {
        "running": 2, "waiting": [1, 0], "counters": {"moves": 1}, "head": {"started": 5},
        "nodes": [{"name": "n", "lanes": 8, "tokens_per_s": 10.0, "faults": 0}],
    }  # fmt: skip
    other = {
        "running": 3, "waiting": [0, 4], "counters": {"moves": 2}, "head": {"started": 6},
        "nodes": [{"name": "n", "lanes": 8, "tokens_per_s": 5.0, "faults": 1}],
    }  # fmt: skip
    shown = merge.fleets(own, [other])
    assert (shown["running"], shown["waiting"], shown["counters"]) == (5, [1, 4], {"moves": 3})
    assert shown["nodes"] == [{"name": "n", "lanes": 8, "tokens_per_s": 15.0, "faults": 1}]
    assert [each["started"] for each in shown["workers"]] == [5, 6]


def measured(seed: int, node: str) -> Vitals:
    """What one worker saw within a minute."""
    vitals, draw = Vitals(), random.Random(seed)
    for number in range(200):
        now_ns = number * SECOND // 5
        vitals.first_token(now_ns, draw.expovariate(4.0))
        vitals.delivered(now_ns, draw.expovariate(30.0), node, draw.randrange(1, 9))
    vitals.moved(NOW_NS)
    return vitals


NOW_NS, WALL_S = 41 * SECOND, 1_700_000_000


def share_of_worker(vitals: Vitals, points: int) -> dict[str, Any]:
    slots = json.loads(json.dumps(vitals.shares(NOW_NS)))
    return {"now_ns": NOW_NS, "wall_s": WALL_S, "points": points, "slots": slots}


def test_quantiles_and_rates_are_those_of_one_head_that_saw_it_all() -> None:
    parts = [measured(1, "n"), measured(2, "n"), measured(3, "other")]
    whole = Vitals()
    draws = [random.Random(seed) for seed in (1, 2, 3)]
    for number in range(200):
        for draw, node in zip(draws, ("n", "n", "other"), strict=True):
            now_ns = number * SECOND // 5
            whole.first_token(now_ns, draw.expovariate(4.0))
            whole.delivered(now_ns, draw.expovariate(30.0), node, draw.randrange(1, 9))
    for _ in parts:
        whole.moved(NOW_NS)
    own, *others = [{"share": share_of_worker(each, 120), "sessions": [n], "sessions_total": 201}
                    for n, each in enumerate(parts)]  # fmt: skip
    shown = merge.fleets(own, others)
    assert shown["vitals"] == whole.summary(NOW_NS)
    assert shown["vitals"]["ttft_ms"]["count"] == 600
    assert shown["points"] == whole.points(NOW_NS, WALL_S)
    assert (shown["sessions"], shown["sessions_total"]) == ([0, 1, 2], 603)
    assert "share" not in shown
    alone = merge.fleets({"share": share_of_worker(parts[0], 0)}, [])
    assert alone["vitals"] == parts[0].summary(NOW_NS)
    assert "points" not in alone
    assert "sessions" not in alone


def test_every_gauge_of_a_head_is_known_to_be_its_own_or_seen_by_all() -> None:
    seen_by_all = {
        "up", "state", "lanes", "queued", "kv_blocks", "prefill_tokens_per_second", "circuit", "link_age_seconds",
        "link_rtt_seconds",
    }  # fmt: skip
    known = {f"superfluid_head_node_{name}" for name in seen_by_all}
    known |= {"superfluid_head_ready", "superfluid_head_info", *merge.OWN_GAUGES}
    families = list(HeadMetrics().registry.collect())
    assert {family.name for family in families if family.type == "gauge"} == known
    counters = {family.name + "_total" for family in families if family.type == "counter"}
    assert counters > merge.SHARED_COUNTERS


def test_what_the_parent_counts_is_not_added_up() -> None:
    page = '# TYPE superfluid_head_worker_ends_total counter\nsuperfluid_head_worker_ends_total{cause="hung"} 2.0\n'
    assert '{cause="hung"} 2.0' in merge.metrics([page, page])


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Know the session `mine`, drain any node, and hand back what is sent."""
    path = scope["path"]
    response: Response = JSONResponse({"error": "no such session"}, 404)
    if path == "/metrics":
        response = PlainTextResponse(PAGE)
    elif path == "/v1/sessions":
        response = JSONResponse({"object": "list", "data": ["mine"]})
    elif path == "/v1/sessions/mine/qos":
        response = JSONResponse({"class": (await Request(scope, receive).json())["class"]})
    elif path.endswith("/drain") or path == "/v1/sessions/mine":
        response = JSONResponse({"id": "mine"})
    await response(scope, receive, send)


def siblings(tmp_path: Path, there: Callable[[str, bytes], Answered]) -> Siblings:
    """Make worker 0 of 2; `there` answers for the other."""

    class Told(Siblings):
        """Does not go by any door."""

        async def _there(self, number: int, scope: Scope, body: bytes, ask_s: float) -> Answered:
            return there(scope["path"], body)

    return Told(_app, Place(0, 2, tmp_path, 0), HttpLimits())


def call(app: Siblings, method: str, path: str, body: Any = None) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://head") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(run())


def test_a_summed_route_takes_what_answers(tmp_path: Path) -> None:
    whole = Answered(200, (), json.dumps({"data": ["theirs"]}).encode())
    for answer, listed in ((whole, ["mine", "theirs"]), (Answered(), ["mine"])):
        app = siblings(tmp_path, lambda _path, _body, answer=answer: answer)  # type: ignore[misc]
        reply = call(app, "GET", "/v1/sessions")
        assert reply.json() == {"object": "list", "data": listed}
    app = siblings(tmp_path, lambda _path, _body: Answered(200, (), PAGE.encode()))
    assert 'a_total{x="1"} 4.0' in call(app, "GET", "/metrics").text


def test_whoever_has_a_session_answers_for_it(tmp_path: Path) -> None:
    theirs = Answered(200, ((b"content-type", b"application/json"),), b'{"id": "theirs"}')
    asked: list[tuple[str, bytes]] = []

    def there(path: str, body: bytes) -> Answered:
        asked.append((path, body))
        return theirs if "theirs" in path else Answered(404, (), b"{}")

    app = siblings(tmp_path, there)
    assert call(app, "DELETE", "/v1/sessions/mine").json() == {"id": "mine"}
    assert call(app, "POST", "/v1/sessions/mine/qos", {"class": "agent"}).json() == {
        "class": "agent"
    }
    assert asked == []
    assert call(app, "DELETE", "/v1/sessions/theirs").json() == {"id": "theirs"}
    assert call(app, "POST", "/v1/sessions/theirs/qos", {"class": "agent"}).status_code == 200
    assert json.loads(asked[-1][1]) == {"class": "agent"}
    assert call(app, "GET", "/v1/sessions/nobodys").status_code == 404
    assert call(app, "GET", "/v1/models").status_code == 404
    assert len(asked) == 3


def test_what_one_worker_refuses_to_do_to_a_node_is_told(tmp_path: Path) -> None:
    refused = Answered(404, (), b'{"error": "no such node"}')
    for answer, status in ((refused, 404), (Answered(), 200), (Answered(200), 200)):
        app = siblings(tmp_path, lambda _path, _body, answer=answer: answer)  # type: ignore[misc]
        assert call(app, "POST", "/v1/fleet/nodes/a/drain").status_code == status


def test_a_worker_that_keeps_dying_waits_longer_each_time(tmp_path: Path) -> None:
    child = Child(0, tmp_path, WorkerLimits())
    try:
        pauses, now_ns = [], 0
        for _ in range(8):
            child.begin(now_ns)
            pauses.append(child.ended(now_ns))
            assert child.due_ns == now_ns + pauses[-1] * MS
        assert pauses == [200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000]
        child.begin(now_ns)
        assert child.ended(now_ns + 61 * SECOND) == 200
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.sendto(b"READY=1\nSTATUS=serving", str(child.path))
        assert child.words() == ["READY=1", "STATUS=serving"]
        assert child.words() == []
    finally:
        child.channel.close()


def test_workers_share_a_port_that_nobody_else_has() -> None:
    reserved = reserve_sockets([("127.0.0.1", 0)])
    shared = [open_sockets(bound(reserved), is_shared=True) for _ in range(2)]
    try:
        assert bound(shared[0]) == bound(shared[1]) == bound(reserved)
        shared[0][0].listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            reserve_sockets(bound(reserved))
    finally:
        for one in (*reserved, *shared[0], *shared[1]):
            one.close()


def configured(*models: str, **flags: Any) -> HeadConfig:
    settings = merge_settings(OPTIONS, {"model": models, **flags}, {}, {})
    return build_config(settings, Surroundings(None, None))


def test_what_workers_cannot_share_is_refused() -> None:
    fleet = {"fleet": ("127.0.0.1:9",), "workers": 2}
    assert configured(**fleet).workers == 2
    with pytest.raises(ConfigError, match="needs --fleet"):
        configured("demo", workers=2)
    with pytest.raises(ConfigError, match="--fleet-listen"):
        configured(**fleet, fleet_listen=("127.0.0.1:0",))


def test_rates_are_divided_and_other_limits_are_not() -> None:
    config = configured(
        fleet=("127.0.0.1:9",), workers=4, rate_limit=10, completion_rate=10.0, completion_burst=2
    )
    assert config.access.rate_limit_rpm == 3
    assert (config.qos.completions.per_second, config.qos.completions.burst) == (2.5, 1)
    ring = KeyRing(
        [("a secret of mine", Principal("a", False, None, None, False, None, 1, 7, 9, 5))]
    )
    found = ring.shared_by(2).find(b"a secret of mine")
    assert found is not None
    assert (found.rate_limit_rpm, found.tokens_per_minute, found.max_concurrent) == (4, 5, 5)
