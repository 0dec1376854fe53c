"""Alerts, dashboards and scrape configuration as files: well-formed, checked by promtool, each alert seen to fire and to clear."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import yaml

from tests.observability.promql import (
    CONFIG,
    DASHBOARDS,
    RULES,
    TESTS,
    Expression,
    Series,
    expressions,
    panels,
    rules,
)

PROMTOOL = shutil.which("promtool")
with_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)"
)


def promtool(*words: str) -> str:
    assert PROMTOOL is not None
    run = subprocess.run(
        [PROMTOOL, *words], capture_output=True, text=True, timeout=50, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@with_promtool
def test_promtool_takes_the_rules_and_the_scrape_configuration() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(RULES))
    promtool("check", "config", "--syntax-only", str(CONFIG))


@with_promtool
def test_every_alert_fires_and_clears() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(TESTS))


def test_no_alert_goes_without_a_test_that_fires_and_one_that_clears_it() -> None:
    cases = yaml.safe_load(TESTS.read_text(encoding="utf-8"))["tests"]
    fired, cleared = set(), set()
    for case in cases:
        for look in case["alert_rule_test"]:
            if look["exp_alerts"]:
                fired.add(look["alertname"])
            elif look["alertname"] in fired:
                cleared.add(look["alertname"])
    assert fired == cleared == set(rules())


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for name, rule in rules().items():
        assert name.startswith("Superfluid")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "action"}


def test_dashboards_have_names_of_their_own_and_no_two_panels_in_one_place() -> None:
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS]
    assert [board["uid"] for board in boards] == [path.stem for path in DASHBOARDS]
    for board in boards:
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (place["x"] + x, place["y"] + y)
                for x in range(place["w"])
                for y in range(place["h"])
            }
            assert not cells & taken, panel["title"]
            assert max(x for x, _ in cells) < 24
            taken |= cells
    for board, panel in panels():
        if panel["type"] != "row":
            assert panel["targets"], (board, panel["title"])
            assert panel["datasource"]["uid"] == "${datasource}"


PAGE = 'superfluid_a_total{x="1",y="2"} 1\nsuperfluid_b{x="3"} 1\n'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('sum by (x) (rate(superfluid_a_total{y="2"}[5m])) / superfluid_b', ""),
        ("superfluid_c", "no series superfluid_c"),
        ('superfluid_a_total{z="2"}', "has no label z"),
        ('superfluid_a_total{x="9"}', "no series superfluid_a_total{x='9'}"),
        ('superfluid_a_total{x=~"9|$v", job="j"}', ""),
        ("sum by (z) (superfluid_b)", "groups by z"),
        ('up{job="x"} == 0', ""),
    ],
)
def test_a_selector_of_what_is_not_there_would_be_found(text: str, fault: str) -> None:
    found = "; ".join(Series(PAGE).faults(Expression("here", text)))
    assert (fault in found) if fault else not found


def test_every_file_is_looked_at() -> None:
    assert len(DASHBOARDS) == 3
    assert len(expressions()) > 100
