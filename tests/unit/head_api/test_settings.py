"""Flags of a head that expose the scheduler: its own, and those of the node that `serve MODEL` starts."""

from __future__ import annotations

from typing import Any

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.session import QosClass
from superfluid_head.access.ratelimit import RateLimit
from superfluid_head.api.qos import QosRules
from superfluid_head.config import (
    LOCAL_OPTIONS,
    OPTIONS,
    HeadConfig,
    Surroundings,
    build_config,
    read_settings,
)
from superfluid_head.text.dialects.detect import DialectChoice
from superfluid_head.text.dialects.dialect import Dialect
from superfluid_noded.config import OPTIONS as NODE_OPTIONS


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.env, raising=False)
    monkeypatch.delenv("SUPERFLUID_CONFIG", raising=False)


def config(**flags: Any) -> HeadConfig:
    return build_config(
        read_settings({"model": ("demo",), **flags}, None), Surroundings(None, None)
    )


def test_defaults_are_those_of_the_documents() -> None:
    made = config()
    assert made.qos == QosRules()
    assert made.qos.default is QosClass.AGENT
    assert made.qos.completions == RateLimit(10, 20)
    assert made.fleet_limits.queue_max == 256
    assert made.fleet_limits.ttft_slo_ms == 0
    assert made.fleet_limits.no_node_wait_ms == 30_000
    assert not made.prefix_shared
    assert made.node_arguments == ()


def test_the_heads_own_flags_arrive() -> None:
    made = config(
        http_default_qos="inline-completion", no_http_qos_header=True, http_allow_batch_invariant=True,
        completion_rate="2.5", completion_burst="7", completion_deadline_ms="900", max_queue="9",
        max_queued_tokens="1000", ttft_slo_ms="4000", no_node_wait_ms="250",
    )  # fmt: skip
    assert made.qos == QosRules(QosClass.COMPLETION, False, True, RateLimit(2.5, 7), 900)
    limits = made.fleet_limits
    assert (limits.queue_max, limits.queued_tokens_max, limits.ttft_slo_ms) == (9, 1_000, 4_000)
    assert (limits.pool_high_pct, limits.no_node_wait_ms) == (90, 250)
    assert config(fleet_pool_high="75").fleet_limits.pool_high_pct == 75
    assert config(http_default_qos="0").qos.default is QosClass.INTERACTIVE


def test_a_local_node_gets_its_flags_word_for_word() -> None:
    made = config(
        class_lanes="background=2,agent=6", queue_policy="fair", park=True, prefix_scope="shared",
        node_arg=("--mock-seed=3",),
    )  # fmt: skip
    assert made.node_arguments == (
        *("--class-lanes", "background=2,agent=6", "--queue-policy", "fair", "--park"),
        *("--prefix-scope", "shared", "--mock-seed=3"),
    )
    assert made.prefix_shared


def test_every_flag_of_the_local_node_is_one_of_nodes() -> None:
    nodes = {option.name: option.is_flag for option in NODE_OPTIONS}
    assert all(nodes[option.name] is option.is_flag for option in LOCAL_OPTIONS)


def test_flags_of_a_local_node_are_refused_beside_a_fleet_but_its_environment_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="--class-lanes belongs to a local node"):
        config(fleet=("127.0.0.1:1",), class_lanes="agent=1")
    monkeypatch.setenv("SUPERFLUID_CLASS_LANES", "agent=1")
    assert config(fleet=("127.0.0.1:1",)).node_arguments == ()
    assert config().node_arguments == ("--class-lanes", "agent=1")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"http_default_qos": "vip"}, "interactive, completion, agent, background"),
        ({"completion_rate": "-1"}, "a second"), ({"completion_rate": "fast"}, "not a number"),
        ({"completion_burst": "0"}, "outside"), ({"prefix_scope": "all"}, "none of tenant, shared"),
        ({"max_queue": "-1"}, "outside"), ({"fleet_pool_high": "0"}, "outside"), ({"fleet_pool_high": "101"}, "outside"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config(**flags)


def test_a_head_of_a_fleet_takes_several_models_and_a_local_node_one() -> None:
    made = config(model=("demo", "other.gguf", "demo"), fleet=("127.0.0.1:8454",))
    assert made.models == ("demo", "other.gguf")
    with pytest.raises(ConfigError, match="a local node serves one"):
        config(model=("demo", "other.gguf"))


def test_dialects_are_chosen_by_name_and_unknown_names_are_refused_with_the_list() -> None:
    made = config()
    assert made.dialects == DialectChoice()
    assert made.reasoning_field == "reasoning_content"
    made = config(dialect="glm", tool_call_parser="mistral", reasoning_parser="none")
    assert made.dialects.resolve("") == Dialect("mistral", None)
    for name in ("dialect", "tool_call_parser", "reasoning_parser", "reasoning_field"):
        with pytest.raises(ConfigError, match=r"'klingon' is none of .*(auto|both)"):
            config(**{name: "klingon"})
