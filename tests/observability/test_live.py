"""A small fleet of real processes, observed from all sides: its pages, its traces, its log, and a real Prometheus if there is one.

Two simulated nodes and a head; one answer is moved by a drain while it is written. Everything is on loopback and ends with the module.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from superfluid_head.bench.rig import Rig, hostport
from superfluid_head.bench.small_fleet import Shape, SmallFleet
from tests.observability.promql import DEPLOY, RULES, Series, expressions
from tests.observability.receiver import Receiver, Seen

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SECRET = "the-word-that-must-not-be-told"
# a failed answer, which no healthy fleet has; test_head_metrics.py makes one
UNSEEN = "no series superfluid_head_generations_total{finish='error'}"
PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")


@dataclass
class Observed:
    """The fleet after it has worked, and what was seen of it."""

    fleet: SmallFleet
    receiver: Receiver
    moved_from: str
    answer: list[dict[str, Any]]
    pages: dict[str, str] = field(default_factory=dict)


def ask(fleet: SmallFleet, tokens: int, headers: dict[str, str]) -> list[dict[str, Any]]:
    """Stream an answer; returns its chunks."""
    body = {
        "model": fleet.served,
        "messages": [{"role": "user", "content": f"{SECRET} " * 30}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = f"{fleet.url}/v1/chat/completions"
    with httpx.stream(
        "POST", url, json=body, timeout=50, trust_env=False, headers=headers
    ) as reply:
        assert reply.status_code == 200
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def ask_and_drain(fleet: SmallFleet) -> tuple[str, list[dict[str, Any]]]:
    """Stream an answer and drain its node in the middle."""
    chunks: list[dict[str, Any]] = []
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "seen-1"}
    reader = threading.Thread(target=lambda: chunks.extend(ask(fleet, 80, headers)))
    reader.start()
    name = ""
    deadline_s = time.monotonic() + 20
    with httpx.Client(base_url=f"{fleet.url}/v1/fleet", trust_env=False) as admin:
        while not name and time.monotonic() < deadline_s:
            busy = [node["name"] for node in admin.get("").json()["nodes"] if node["sessions"]]
            name = busy[0] if busy else ""
        time.sleep(0.4)
        admin.post(f"/nodes/{name}/drain", json={"grace_ms": 0}).raise_for_status()
        reader.join(50)
        admin.post(f"/nodes/{name}/undrain").raise_for_status()
    return name, chunks


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    with Receiver() as receiver, Rig() as rig:
        traced = ("--otlp-endpoint", receiver.endpoint)
        rates = ("--mock-rates", "prefill=4000,decode=60", "--mock-eos", "0")
        flags = ("--engine", "mock", "--model", "demo", *rates, *traced)
        head_flags = (*traced, "--log-format", "json")
        fleet = SmallFleet(rig, flags, "demo", 2, Shape(head_flags=head_flags))
        for qos in ("interactive", "background"):
            ask(fleet, 6, {"x-superfluid-qos": qos})
        moved_from, answer = ask_and_drain(fleet)
        seen = Observed(fleet, receiver, moved_from, answer)
        for name, url in scraped(fleet).items():
            seen.pages[name] = httpx.get(f"{url}/metrics", trust_env=False).text
        yield seen


def scraped(fleet: SmallFleet) -> dict[str, str]:
    nodes = {name: fleet.node(name).ready["metrics"] for name in fleet.addresses}
    return {"head": fleet.url} | {name: "http://" + hostport(at) for name, at in nodes.items()}


# --- pages ------------------------------------------------------------------------------------------


def test_every_selector_of_the_dashboards_and_alerts_exists_on_a_live_fleet(
    observed: Observed,
) -> None:
    series = Series(*observed.pages.values())
    faults = [fault for each in expressions() for fault in series.faults(each)]
    assert not [fault for fault in faults if not fault.endswith(UNSEEN)]


def test_what_was_done_stands_on_the_heads_page(observed: Observed) -> None:
    page = observed.pages["head"]
    assert 'superfluid_head_moves_total{cause="drain"} 1.0' in page
    placed = f'superfluid_head_placements_total{{node="{observed.moved_from}"'
    assert f'{placed},policy="load-aware",reason="new"}} ' in page
    assert 'reason="drain"} 1.0' in page
    parts = re.findall(r'ttft_part_seconds_count\{part="(\w+)"\} 3.0', page)
    assert sorted(parts) == ["network", "prefill", "queue"]
    sums = {
        part: float(value)
        for part, value in re.findall(r'ttft_part_seconds_sum\{part="(\w+)"\} (\S+)', page)
    }
    whole = sum(map(float, re.findall(r"head_ttft_seconds_sum\{.*\} (\S+)", page)))
    assert 0.5 * whole < sum(sums.values()) <= whole + 0.05
    assert sums["prefill"] > sums["queue"]
    for name in observed.fleet.addresses:
        assert f'superfluid_head_node_state{{node="{name}",state="up"}} 1.0' in page
        assert re.search(rf'superfluid_head_node_link_rtt_seconds{{node="{name}"}} 0\.0', page)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_has_nothing_to_say_about_the_pages(observed: Observed) -> None:
    for page in observed.pages.values():
        command = [str(PROMTOOL), "check", "metrics"]
        run = subprocess.run(command, input=page, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# --- traces -----------------------------------------------------------------------------------------

DRAWN_IN_VAIN_MAX = 3


def test_one_trace_shows_head_and_both_nodes_of_an_answer_that_moved(observed: Observed) -> None:
    names = {
        "POST": 1,
        "choice": 1,
        "placement": 2,
        "session": 2,
        "queue": 2,
        "prefill": 2,
        "decode": 2,
    }
    spans = observed.receiver.wait_for(TRACE, names)
    print(observed.receiver.tree(TRACE))  # `-s` shows it
    (root,) = (span for span in spans if span.name.startswith("POST"))
    assert (root.name, root.parent) == ("POST /v1/chat/completions", PARENT)
    assert root.fields["superfluid.request_id"] == "seen-1"
    (choice,) = under(spans, root)
    events = [(name, fields.get("node"), fields.get("cause")) for name, fields in choice.events]
    to = ({*observed.fleet.addresses} - {observed.moved_from}).pop()
    assert events == [
        ("placed", observed.moved_from, None),
        ("moved", None, "drain"),
        ("placed", to, None),
    ]
    tokens = 0
    for placement, node in zip(under(spans, choice), (observed.moved_from, to), strict=True):
        (session,) = under(spans, placement)
        assert (placement.name, session.instance) == (f"placement {node}", node)
        phases = under(spans, session)
        assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
        assert phases[1].fields["engine.steps"] >= 1
        assert phases[2].fields["engine.steps"] >= phases[2].fields["tokens"] - 1 > 0
        tokens += int(phases[2].fields["tokens"])
    assert choice.fields["gen_ai.usage.output_tokens"] == 80
    # what the node that is left draws while the word that its session has moved is on its way is nobody's
    assert 80 <= tokens <= 80 + DRAWN_IN_VAIN_MAX
    assert not any(span.is_error for span in spans)


def under(spans: list[Seen], parent: Seen) -> list[Seen]:
    found = [span for span in spans if span.parent == parent.span]
    return sorted(found, key=lambda span: span.began_ns)


def test_no_span_and_no_line_of_the_log_holds_what_was_said(observed: Observed) -> None:
    told = repr(observed.receiver.spans) + observed.fleet.head.log_text()
    told += "".join(observed.fleet.node(name).log_text() for name in observed.fleet.addresses)
    assert SECRET not in told
    said = "".join(
        str(chunk["choices"][0]["delta"].get("content") or "")
        for chunk in observed.answer
        if chunk["choices"]
    )
    assert len(said) > 20
    assert said[:20] not in told


# --- the log ----------------------------------------------------------------------------------------


def test_the_log_has_one_line_for_a_generation_with_its_figures(observed: Observed) -> None:
    lines = [json.loads(line) for line in observed.fleet.head.log_text().splitlines()]
    access = [line for line in lines if line["logger"] == "superfluid_head.access"]
    assert len(access) == 3
    (line,) = (line for line in access if line["request_id"] == "seen-1")
    usage = observed.answer[-1]["usage"]
    told = {"status": 200, "class": "agent", "tenant": "anonymous", "moves": 1, "finish": "length"}
    told |= {"completion": 80, "prompt": usage["prompt_tokens"], "stream": True, "trace": TRACE}
    assert told.items() <= line.items()
    assert line["cached"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
    assert 0 < line["rate"] < 100
    assert line["prompt_rate"] > 0


# --- a real Prometheus --------------------------------------------------------------------------------


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")
def test_a_real_prometheus_scrapes_the_fleet_and_evaluates_every_expression(
    observed: Observed, tmp_path: Path
) -> None:
    with (
        prometheus(observed.fleet, tmp_path) as url,
        httpx.Client(base_url=f"{url}/api/v1", trust_env=False, timeout=20) as api,
    ):
        wait_for_scrapes(api, 3)
        for expression in expressions():
            reply = api.get("/query", params={"query": expression.settled()})
            assert reply.json()["status"] == "success", (expression, reply.text)
        for name in {name for each in expressions() for name, _ in each.selectors()}:
            found = api.get("/query", params={"query": f"count({name})"}).json()
            assert found["data"]["result"], name
        groups = api.get("/rules").json()["data"]["groups"]
        states = {rule["name"]: rule["state"] for group in groups for rule in group["rules"]}
        assert set(states.values()) == {"inactive"}, states


def test_no_answer_waits_for_a_collector_that_does_not_answer(observed: Observed) -> None:
    observed.receiver.answers.clear()
    try:
        began_s = time.monotonic()
        for _ in range(3):
            assert len(ask(observed.fleet, 6, {})) > 6
        assert time.monotonic() - began_s < 5.0
        observed.receiver.status = 503
    finally:
        observed.receiver.answers.set()
    deadline_s = time.monotonic() + 20
    failed = 0.0
    with httpx.Client(base_url=observed.fleet.url, trust_env=False) as head:
        while not failed and time.monotonic() < deadline_s:
            page = head.get("/metrics").text
            (found,) = re.findall(r'superfluid_head_spans_total\{outcome="failed"\} (\S+)', page)
            failed = float(found)
            time.sleep(0.1)
    assert failed
    observed.receiver.status = 200
    log = observed.fleet.head.log_text()
    assert log.count("the collector of traces does not take them") == 1


class prometheus:  # noqa: N801 - a context manager that reads like a function
    """Runs Debian's Prometheus on loopback over the fleet and the rules, and ends it."""

    def __init__(self, fleet: SmallFleet, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.where = f"127.0.0.1:{probe.getsockname()[1]}"
        targets = {name: url.removeprefix("http://") for name, url in scraped(fleet).items()}
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(RULES)]
        for job in config["scrape_configs"]:
            job.pop("authorization", None)
            is_head = job["job_name"] == "superfluid-head"
            found = [at for name, at in targets.items() if (name == "head") == is_head]
            job["static_configs"] = [{"targets": found}]
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        self._command = [
            str(PROMETHEUS), f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.where}", "--log.level=warn",
        ]  # fmt: skip

    def __enter__(self) -> str:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        return f"http://{self.where}"

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)


def wait_for_scrapes(api: httpx.Client, targets: int) -> None:
    """Wait until every target was scraped twice."""
    asked = {"query": "sum(count_over_time(up[1m]) >= bool 2)"}
    deadline_s = time.monotonic() + 40
    while time.monotonic() < deadline_s:
        try:
            found = api.get("/query", params=asked).json()["data"]["result"]
        except (httpx.HTTPError, KeyError, ValueError):
            found = []
        if found and float(found[0]["value"][1]) >= targets:
            return
        time.sleep(0.2)
    raise AssertionError("Prometheus did not scrape all targets")
