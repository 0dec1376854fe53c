"""What a head is told about nodes that dial in, and about its own authority."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.errors import ConfigError
from superfluid_core.link.keys import keys_from_secrets
from superfluid_core.wire.schema import Role
from superfluid_head.config import HeadConfig, Surroundings, build_config, read_settings
from superfluid_head.server import run_head
from tests.unit.link.test_pki import issue


def config(**flags: Any) -> HeadConfig:
    given = {"http": ("127.0.0.1:0",)} | flags
    return build_config(read_settings(given, None), Surroundings(None, None))


def refusal(**flags: Any) -> str:
    """What the head says when it does not start."""
    with pytest.raises(ConfigError) as caught:
        asyncio.run(run_head(config(**flags), SystemClock()))
    return caught.value.message


def test_nodes_that_dial_in_stand_beside_a_list_or_instead_of_it() -> None:
    alone = config(fleet_listen=("127.0.0.1",))
    assert alone.has_fleet
    assert alone.fleet_listen == (("127.0.0.1", 8452),)
    assert (alone.fleet, alone.fleet_conns) == ((), 1)
    both = config(fleet_listen=("[::1]:9",), fleet=("127.0.0.1",), fleet_conns_per_node="4")
    assert both.fleet_listen == (("::1", 9),)
    assert len(both.fleet) == 1
    assert both.fleet_conns == 4
    with pytest.raises(ConfigError, match="--fleet-listen"):
        config()
    with pytest.raises(ConfigError, match="belongs to a local node"):
        config(fleet_listen=("127.0.0.1",), max_batch="4")


def test_an_open_door_for_nodes_is_refused() -> None:
    assert "refusing to listen on 0.0.0.0 without a fleet key" in refusal(
        fleet_listen=("0.0.0.0:0",)
    )
    assert "--fleet-listen a..b:8452" in refusal(fleet_listen=("a..b",))


def test_what_is_trusted_is_one_thing(tmp_path: Path) -> None:
    files = {"fleet_ca": "a", "fleet_cert": "b", "fleet_cert_key": "c"}
    for flags in ({"fleet_auth": "k"}, {"insecure_no_auth": True}):
        with pytest.raises(ConfigError, match="--fleet-ca excludes"):
            config(fleet=("127.0.0.1",), **files, **flags)
    assert config(fleet=("10.0.0.1",), **files).is_fleet_judged


def test_a_wrong_certificate_of_the_head_is_refused_at_start_by_name(tmp_path: Path) -> None:
    authority = keys_from_secrets((b"a" * 32,))
    node = issue(tmp_path / "node", authority, Role.NODE)
    head = issue(tmp_path / "head", authority, Role.HEAD)
    told = refusal(
        fleet=("127.0.0.1",), fleet_ca=node.ca, fleet_cert=node.certificate, fleet_cert_key=node.key
    )
    assert "its extended key usage lacks clientAuth: it is no head's" in told
    told = refusal(
        fleet=("127.0.0.1",), fleet_ca=head.ca, fleet_cert=head.certificate, fleet_cert_key=node.key
    )
    assert "KEY_VALUES_MISMATCH" in told
