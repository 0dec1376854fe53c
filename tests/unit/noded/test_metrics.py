"""What is exported: names, bounded labels, and who may read it."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from superfluid_core.errors import ErrorCode
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import StepDone, TickDone, TickOutcome, TickPlan
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import QosClass
from superfluid_noded.metrics import OTHER_TENANTS, TENANTS_MAX, NodeMetrics
from superfluid_noded.web import build_app

NAMES = (
    "superfluid_queue_depth",
    "superfluid_lanes",
    "superfluid_prefill_budget_tokens",
    "superfluid_decode_grant_tokens",
    "superfluid_tick_seconds",
    "superfluid_step_seconds",
    "superfluid_plan_seconds",
    "superfluid_kv_blocks",
    "superfluid_kv_reserved_tokens",
    "superfluid_kv_admit_blocked_total",
    "superfluid_preemptions_total",
    "superfluid_recompute_ratio",
    "superfluid_prefix_hit_tokens_total",
    "superfluid_prefix_miss_tokens_total",
    "superfluid_prefix_evicted_blocks_total",
    "superfluid_park_bytes",
    "superfluid_ttft_seconds",
    "superfluid_itl_seconds",
    "superfluid_queue_wait_seconds",
    "superfluid_tenant_tokens_total",
    "superfluid_sessions_total",
)


def scheduler() -> Scheduler:
    return Scheduler(SchedulerLimits(lanes=4), PoolShape(16, 64, 512))


@pytest.fixture
def metrics() -> NodeMetrics:
    return NodeMetrics(scheduler().stats, {"model": "m"})


def test_the_documented_names_are_all_there(metrics: NodeMetrics) -> None:
    metrics.queue_waited(QosClass.AGENT, 0.1)
    metrics.first_token(QosClass.AGENT, 0.1)
    metrics.next_token(QosClass.AGENT, 0.01)
    metrics.tokens("acme", "prompt", 7)
    metrics.ended("stop")
    metrics.refused(ErrorCode.QUEUE_FULL)
    metrics.planned(TickPlan(1, (), 1), 1_000)
    metrics.stepped(StepDone(1, 0, (), (), (), 0, 1_000_000))
    metrics.ticked(TickDone(1, TickOutcome.COMPLETE, 1, 1_000_000))
    text = metrics.expose().decode()
    for name in NAMES:
        assert f"\n{name}" in text, name
    assert 'superfluid_lanes{state="free"} 4.0' in text
    assert 'superfluid_kv_blocks{state="free"} 64.0' in text
    assert 'superfluid_tenant_tokens_total{kind="prompt",tenant="acme"} 7.0' in text


def test_tenants_beyond_the_bound_are_counted_together(metrics: NodeMetrics) -> None:
    for number in range(TENANTS_MAX + 50):
        metrics.tokens(f"tenant-{number}", "completion", 1)
    text = metrics.expose().decode()
    assert text.count("superfluid_tenant_tokens_total{") == TENANTS_MAX + 1
    assert f'tenant="{OTHER_TENANTS}"}} 50.0' in text


def test_the_figures_are_json_with_named_columns() -> None:
    found = NodeMetrics(scheduler().stats, {"model": "m"}).figures({"model": "m"})
    assert found["scheduler"]["queued"] == {
        "interactive": 0,
        "completion": 0,
        "agent": 0,
        "background": 0,
    }
    assert found["scheduler"]["blocks"] == 64
    assert found["node"] == {"model": "m"}


def client(
    token: bytes | None, base: str = "http://127.0.0.1:1", *, well: bool = True
) -> TestClient:
    def health() -> tuple[bool, dict[str, Any]]:
        return well, {"status": "x"}

    app = build_app(lambda: b"metric 1\n", lambda: {"a": 1}, health, token)
    return TestClient(app, base_url=base)


def test_the_routes_answer_on_loopback() -> None:
    with client(None) as http:
        assert http.get("/metrics").text == "metric 1\n"
        assert http.get("/scheduler/stats").json() == {"a": 1}
        assert http.get("/healthz").status_code == 200
        assert http.post("/metrics").status_code == 405
        assert http.get("/other").status_code == 404
    with client(None, well=False) as http:
        assert http.get("/healthz").status_code == 503


@pytest.mark.parametrize(
    ("status", "well", "live", "ready"),
    [("ok", True, 200, 200), ("draining", False, 200, 503), ("engine hung", False, 503, 503)],
)
def test_probes_need_no_token_and_tell_a_hung_node_from_one_that_drains(
    status: str, well: bool, live: int, ready: int
) -> None:
    app = build_app(
        lambda: b"", dict, lambda: (well, {"status": status, "sessions": 3}), b"0123456789abcdef"
    )
    with TestClient(app, base_url="http://10.0.0.1") as http:
        assert http.get("/livez").status_code == live
        assert http.get("/readyz").status_code == ready
        assert http.get("/readyz").json() == {"status": status}
        assert http.get("/healthz").status_code == 401


def test_a_web_page_cannot_read_a_loopback_listener_through_its_own_name() -> None:
    for base in ("http://evil.example", "http://10.0.0.1"):
        with client(None, base) as http:
            for path in ("/metrics", "/scheduler/stats", "/healthz"):
                assert http.get(path).status_code == 403
    for base in ("http://localhost:8463", "http://[::1]:8463"):
        with client(None, base) as http:
            assert http.get("/metrics").status_code == 200


def test_a_token_is_asked_for_where_there_is_one() -> None:
    with client(b"0123456789abcdef", "http://10.0.0.1") as http:
        for path in ("/metrics", "/scheduler/stats", "/healthz"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
            right = {"authorization": "Bearer 0123456789abcdef"}
            assert http.get(path, headers=right).status_code == 200
