"""Addresses, identities and what a model name stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.session import Determinism
from superfluid_core.wire.messages import ModelOffer, Welcome
from superfluid_head.fleet.directory import Directory, NodeAddress, parse_fleet

OFFER = ModelOffer("m", "w1", "t1", "f32", "sim", 100, (2,), 4_096, 8, 16, 64)
WELCOME = Welcome(0, (), "box-a", "boot", (OFFER,), 1, Determinism.EXACT, 16, 30_000, 120_000)


def test_fleet_lists_are_read_with_names_ports_and_brackets() -> None:
    nodes = parse_fleet(["box-a=10.0.0.1:9000,10.0.0.2", "v6=[::1]:9001,[::2],host.example:1"])
    assert nodes == (
        NodeAddress("10.0.0.1", 9000, "box-a"),
        NodeAddress("10.0.0.2", 8454),
        NodeAddress("::1", 9001, "v6"),
        NodeAddress("::2", 8454),
        NodeAddress("host.example", 1),
    )
    assert [node.key for node in nodes[:2]] == ["box-a", "10.0.0.2:8454"]
    assert str(nodes[2]) == "[::1]:9001"


@pytest.mark.parametrize(
    "text", ["a:0", "a:99999", "a:x", "=a:1", "x=", "[::1:5", "a:1,a:1", "n=a:1,n=b:1", "[::1]x"]
)
def test_what_cannot_be_an_address_is_a_configuration_error(text: Any) -> None:
    with pytest.raises(ConfigError):
        parse_fleet(text)


def test_a_nodes_file_is_read_beside_other_addresses(tmp_path: Any) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text(
        'nodes = ["box-a=10.0.0.1:9000", "10.0.0.2", { name = "box-c", host = "::1", port = 9001 }]'
    )
    assert parse_fleet([f"@{file}", "x=h:1"]) == (
        NodeAddress("10.0.0.1", 9000, "box-a"),
        NodeAddress("10.0.0.2", 8454),
        NodeAddress("::1", 9001, "box-c"),
        NodeAddress("h", 1, "x"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "nodes = 5",
        "nodes = [5]",
        "other = []",
        'nodes = ["a:1", "a:1"]',
        'nodes = ["a:1,b:2"]',
        'nodes = ["@/etc/passwd"]',
        'nodes = [{ host = "a", port = "1" }]',
        'nodes = [{ host = "a", weight = 2 }]',
        'nodes = [{ host = "a=b" }]',
        'nodes = [{ host = "a", port = 99999 }]',
        "nodes = [",
    ],
)
def test_a_nodes_file_that_is_wrong_is_refused_as_a_whole(tmp_path: Any, text: Any) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        parse_fleet(f"@{file}")


def test_a_nodes_file_that_is_not_there_says_so(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        parse_fleet(f"@{tmp_path}/none.toml")


def test_an_identity_is_live_at_one_address_only_and_the_refusal_names_it() -> None:
    directory = Directory()
    assert directory.admit("a:1", "box-a", WELCOME).offers
    second = directory.admit("b:1", "b:1", WELCOME)
    assert not second.offers
    assert "'box-a'" in second.complaints[0]
    assert "a:1" in second.complaints[0]
    directory.leave("a:1")
    assert directory.admit("b:1", "b:1", WELCOME).offers


def test_other_weights_under_the_same_name_are_refused_unless_mixed() -> None:
    other = replace(WELCOME, node="box-b", models=(replace(OFFER, weights="w2"),))
    directory = Directory()
    directory.admit("a", "box-a", WELCOME)
    refused = directory.admit("b", "box-b", other)
    assert not refused.offers
    assert "--allow-mixed" in refused.complaints[0]
    directory.leave("a")
    assert directory.admit("b", "box-b", other).offers
    mixed = Directory(allow_mixed=True)
    mixed.admit("a", "box-a", WELCOME)
    assert mixed.admit("b", "box-b", other).offers


def test_another_tokenizer_is_refused_even_when_mixed() -> None:
    directory = Directory(allow_mixed=True)
    directory.admit("a", "box-a", WELCOME)
    other = replace(WELCOME, node="box-b", models=(replace(OFFER, text="t2"),))
    assert not directory.admit("b", "box-b", other).offers


def test_the_heads_own_model_files_decide_which_tokenizer_is_right() -> None:
    directory = Directory(texts={"m": "t9"})
    refused = directory.admit("a", "box-a", WELCOME)
    assert not refused.offers
    assert "t9" in refused.complaints[0]


def test_a_model_whose_nodes_are_gone_stays_listed() -> None:
    directory = Directory()
    directory.admit("a", "box-a", WELCOME)
    wider = replace(WELCOME, node="box-b", models=(replace(OFFER, window=8_192),))
    directory.admit("b", "box-b", wider)
    (model,) = directory.models()
    assert (model.is_up, model.window, model.nodes, model.lanes) == (
        True,
        8_192,
        ("box-a", "box-b"),
        16,
    )
    directory.leave("a")
    directory.leave("b")
    (model,) = directory.models()
    assert (model.is_up, model.nodes, model.vocabulary) == (False, (), 100)
    assert directory.knows("m")
    assert not directory.knows("other")


def test_a_node_without_models_is_refused() -> None:
    assert not Directory().admit("a", "a", replace(WELCOME, models=())).offers
