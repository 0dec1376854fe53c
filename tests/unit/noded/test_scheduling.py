"""The scheduler's flags: names of scheduler.md, defaults of its rules, contradictions told at start-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.rules import (
    Batching,
    PreemptMode,
    PrefillMode,
    QueueOrder,
    Reserve,
    Rules,
    Victim,
)
from superfluid_core.session import QosClass
from superfluid_core.wire.announced import tenant_lanes_of
from superfluid_noded.answers import FEATURES, NodeCard
from superfluid_noded.config import OPTIONS, Surroundings, build_config, read_settings
from superfluid_noded.scheduling import (
    FairWeights,
    Scheduling,
    parse_class_lanes,
    parse_fair_weights,
)

AROUND = Surroundings(None, None, None, None)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.env, raising=False)
    monkeypatch.delenv("SUPERFLUID_CONFIG", raising=False)


def scheduling(**flags: Any) -> Scheduling:
    return build_config(read_settings({"model": "demo", **flags}, None), AROUND).scheduling


def test_without_flags_everything_is_as_the_scheduler_has_it() -> None:
    made = scheduling()
    assert made.rules == Rules()
    assert made.limits == SchedulerLimits()
    assert made.pressure_file is None
    assert made.pin_budget_pct == 50


def test_every_flag_reaches_the_rules() -> None:
    rules = scheduling(
        queue_policy="fair", fair_weights="output=5", class_lanes="background=2,foreground=6", tenant_lanes="3",
        tenant_weights="a=2,b=1",
        kv_reserve="full", ttft_slo_ms="900", victim="least-work", admit_after_preempt="off", pressure_high="80",
        pressure_low="60", prefix_scope="shared", batching="static", prefill_mode="alternating", park=True,
        park_bytes="2GiB", preempt_mode="swap",
    ).rules  # fmt: skip
    assert rules == Rules(
        queue_order=QueueOrder.FAIR,
        fair_prompt_weight=1,
        fair_output_weight=5,
        class_lanes={QosClass.BACKGROUND: 2, QosClass.AGENT: 6},
        tenant_lanes=3,
        tenant_weights=(("a", 2), ("b", 1)),
        reserve=Reserve.FULL,
        ttft_slo_ms=900,
        pressure_high_pct=80,
        pressure_low_pct=60,
        victim=Victim.LEAST_WORK,
        admit_after_preempt=False,
        prefix_shared=True,
        batching=Batching.STATIC,
        prefill_mode=PrefillMode.ALTERNATING,
        preempt_mode=PreemptMode.SWAP,
        park=True,
        park_bytes=2 << 30,
    )


def test_every_rule_and_limit_has_a_flag() -> None:
    renamed = {
        "lanes": "max-batch", "queue_max": "max-queue", "queued_tokens_max": "max-queued-tokens",
        "decode_budget": "tick-decode-budget", "watermark_pct": "watermark", "queue_order": "queue-policy",
        "reserve": "kv-reserve", "fair_prompt_weight": "fair-weights", "fair_output_weight": "fair-weights",
        "pressure_high_pct": "pressure-high", "pressure_low_pct": "pressure-low", "prefix_shared": "prefix-scope",
    }  # fmt: skip
    fixed = {"thrash_pct", "hold_oversized"}  # for comparisons, not for operators
    names = {option.name for option in OPTIONS}
    fields = {*SchedulerLimits.__dataclass_fields__, *Rules.__dataclass_fields__} - fixed
    assert not {renamed.get(field, field.replace("_", "-")) for field in fields} - names


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"class_lanes": "agent=9"}, "class-lanes agent=9 is outside 1..8"),
        ({"class_lanes": "agent=0"}, "outside 1..8"),
        ({"class_lanes": "vip=1"}, "interactive, completion, agent, background"),
        ({"class_lanes": "agent=1,foreground=2"}, "named twice"),
        ({"class_lanes": "agent"}, "CLASS=N"),
        ({"fair_weights": "prompt=0,output=0"}, "not both 0"),
        ({"fair_weights": "input=1"}, "prompt=N,output=N"),
        ({"tenant_weights": "a=0"}, "1..1000"),
        ({"queue_policy": "lifo"}, "none of fifo, fair, shortest, prefix"),
        ({"tenant_lanes": "9"}, "tenant-lanes 9 is outside 0..8"),
        ({"pressure_low": "90"}, "pressure-low"),
        ({"prefill_mode": "disaggregated"}, "disaggregated"),
        ({"preempt_mode": "swap"}, "turn park on"),
        ({"prefix_scope": "all"}, "none of tenant, shared"),
        ({"step_tokens": "8"}, "step-tokens 8 must exceed max-batch 8"),
        ({"os_pressure": "on", "os_pressure_file": "/nowhere/memory"}, "/nowhere/memory is not there"),
        ({"record_content": True}, "--record FILE"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused_by_name(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        scheduling(**flags)


def test_many_lanes_need_no_step_tokens_to_start() -> None:
    assert scheduling(max_batch="1024").limits.lanes == 1024


def test_the_host_is_watched_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    file.write_text("")
    assert scheduling(os_pressure="on", os_pressure_file=str(file)).pressure_file == file


def test_texts_become_values_and_back() -> None:
    assert parse_class_lanes(" background = 2 , 0=1")[QosClass.INTERACTIVE] == 1
    assert parse_class_lanes("") == {}
    assert str(parse_class_lanes("3=2,foreground=6")) == "background=2,agent=6"
    weights = parse_fair_weights("prompt=3")
    assert weights == FairWeights(3, 2)
    assert parse_fair_weights(str(weights)) == weights


def test_a_cap_on_tenants_is_announced_to_heads_and_no_cap_is_not() -> None:
    assert NodeCard("n", "b", ()).features == FEATURES
    capped = NodeCard("n", "b", (), tenant_lanes=3).features
    assert tenant_lanes_of(capped) == 3
    assert set(FEATURES) < set(capped)
