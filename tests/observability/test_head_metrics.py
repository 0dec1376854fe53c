"""The head's metrics by themselves: names that cannot grow, histograms that agree with the library's, causes, parts of a wait."""

from __future__ import annotations

import re
from typing import cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.parser import text_string_to_metric_families

from superfluid_core.clock import MS, SECOND
from superfluid_core.families import Histograms
from superfluid_core.placement.reserve import Reservation
from superfluid_core.session import QosClass
from superfluid_core.wire.notes import Timing
from superfluid_head.fleet.causes import CAUSES, FAULT, cause_of
from superfluid_head.fleet.health import NodeState
from superfluid_head.fleet.standing import Slot
from superfluid_head.fleet.stream import Waiting
from superfluid_head.fleet.transitions import Loss
from superfluid_head.metrics import LABEL_VALUES_MAX, OTHERS, TENANTS_MAX, HeadMetrics
from superfluid_head.metrics.head import DETOKENIZE_EVERY, SHORT_SECONDS


def series(metrics: HeadMetrics) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]


def hostile(metrics: HeadMetrics, number: int) -> None:
    """Everything that somebody else names, under a new name."""
    name = f'n{number}"\\\n{{}}'
    metrics.request_done(f"/{name}", 200, 0.1)
    metrics.tenant_done(name, 200)
    metrics.tokens((name, name), prompt=1, cached=0, completion=1)
    metrics.placed(name, "load-aware", f"refused: {name}")
    metrics.moved(f"tokens from {number}, expected {name}")
    meter = metrics.meter(name, QosClass.AGENT)
    meter.first_token(0.1)
    meter.next_tokens(0.1)
    meter.ended("stop", 0.1)


def test_names_that_others_choose_cannot_grow_the_series() -> None:
    metrics = HeadMetrics()
    for number in range(TENANTS_MAX + 10):
        hostile(metrics, number)
    before = len(series(metrics))
    for number in range(TENANTS_MAX + 10, TENANTS_MAX + 200):
        hostile(metrics, number)
    rows = series(metrics)
    assert len(rows) == before
    for name in ("requests", "generations", "placements"):
        of_name = [row for row in rows if row.startswith(f"superfluid_head_{name}_total")]
        assert len(of_name) == LABEL_VALUES_MAX + 1
        assert any('="other"' in row for row in of_name)
    tenants = [row for row in rows if row.startswith("superfluid_head_tenant_requests_total")]
    assert len(tenants) == TENANTS_MAX + 1
    (rest,) = (row for row in tenants if f'"{OTHERS}"' in row)
    assert float(rest.rpartition(" ")[2]) == 200


def test_a_tenant_that_is_called_like_the_rest_is_shown_nobodys_rows() -> None:
    metrics = HeadMetrics()
    for number in range(TENANTS_MAX + 5):
        metrics.tenant_done(f"t{number}", 200)
    metrics.tenant_done("other", 200)
    assert metrics.render("other") == b""


@given(st.lists(st.floats(0, 100, allow_nan=False), max_size=50))
def test_a_plain_histogram_agrees_with_the_librarys(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    made = Histograms("h", "t", ("a",), SHORT_SECONDS)
    ours.register(made)
    reference = TheirHistogram("h", "t", ["a"], buckets=SHORT_SECONDS, registry=theirs)
    for value in values:
        made.of("x").observe(value)
        reference.labels("x").observe(value)
    if values:
        assert samples(ours) == samples(theirs)


def samples(registry: CollectorRegistry) -> list[tuple[str, str, float]]:
    return [
        (sample.name, sample.labels.get("le", ""), round(sample.value, 6))
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


def test_every_way_to_lose_a_placement_has_a_word_of_its_own() -> None:
    words = {cause_of(loss.value) for loss in Loss}
    assert len(words) == len(Loss)
    assert FAULT not in words
    assert cause_of("node draining") == cause_of(Loss.GOING.value) == "drain"
    assert cause_of("refused: queue_full") == "refused"
    assert cause_of("closed by the node: fenced") == "closed"
    assert cause_of("token outside the vocabulary") == FAULT
    assert words <= set(CAUSES)


def test_moves_stand_on_the_page_before_there_was_one() -> None:
    rows = [row for row in series(HeadMetrics()) if row.startswith("superfluid_head_moves_total")]
    assert {row.rpartition(" ")[2] for row in rows} == {"0.0"}
    assert len(rows) == len(CAUSES) - 1


def test_one_delivery_in_so_many_is_timed_the_first_included() -> None:
    meter = HeadMetrics().meter("m", QosClass.AGENT)
    due = [number for number in range(40) if meter.is_due()]
    assert due == [0, DETOKENIZE_EVERY, 2 * DETOKENIZE_EVERY]


def test_a_failed_choice_is_counted_as_one() -> None:
    metrics = HeadMetrics()
    metrics.meter("m", QosClass.INTERACTIVE).ended("error", 0.5)
    found = 'superfluid_head_generations_total{class="interactive",finish="error",model="m"} 1.0'
    assert found in metrics.render().decode()


def slot(placed_ns: int, timing: Timing | None) -> Slot:
    made = Slot(1, 1, 1, "k", "n", cast("Reservation", Mock()), placed_ns)
    made.timing = timing
    return made


@pytest.mark.parametrize(
    ("timing", "split"),
    [
        (Timing(1, 1, 20_000, 300_000), (0.120, 0.300, 0.080)),
        (Timing(1, 1, 0, 900_000), (0.100, 0.900, 0.0)),
        (None, None),
    ],
)
def test_a_wait_for_a_first_token_is_queue_prefill_and_network(
    timing: Timing | None, split: tuple[float, float, float] | None
) -> None:
    waiting = Waiting()
    waiting.enter(5 * SECOND)
    waiting.enter(9 * SECOND)  # placed again: the wait goes on
    placed_ns = 5 * SECOND + 100 * MS
    found = waiting.first_token(slot(placed_ns, timing), placed_ns + 400 * MS)
    assert (found is None) == (split is None)
    if found is not None and split is not None:
        assert found == pytest.approx(split)
    assert waiting.first_token(slot(placed_ns, timing), placed_ns + SECOND) is None
    assert waiting.queued_ns // MS == (120 if timing and timing.queued_us else 100)


def test_rows_of_nodes_are_those_of_the_fleet_as_it_is() -> None:
    node = NodeState(
        name="n1", address="10.0.0.1:8454", is_up=True, state="up", detail="", boot="b", models=("m",), lanes=4, lanes_busy=3,
        queued=2, sessions=5, blocks=100, blocks_used=7, prefill_rate=0.0, circuit="closed", is_draining=False,
    )  # fmt: skip
    metrics = HeadMetrics()
    metrics.nodes([node])
    text = metrics.render().decode()
    assert 'superfluid_head_node_lanes{node="n1",state="busy"} 3.0' in text
    assert 'superfluid_head_node_circuit{node="n1",state="open"} 0.0' in text
    assert "node_link_rtt_seconds{" not in text  # none was measured
    metrics.nodes([])
    assert '{node="n1"' not in metrics.render().decode()


def test_what_is_shown_is_well_formed_whatever_it_is_called() -> None:
    metrics = HeadMetrics()
    hostile(metrics, 1)
    names = [family.name for family in text_string_to_metric_families(metrics.render().decode())]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"superfluid_head_[a-z0-9_]+", name) for name in names)
