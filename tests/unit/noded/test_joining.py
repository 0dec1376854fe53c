"""What a node is told about heads that it dials, and what it says of itself under an own authority."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.link.keys import keys_from_secrets
from superfluid_core.wire.messages import MINOR, Hello
from superfluid_core.wire.schema import Role
from superfluid_noded.cli import run
from superfluid_noded.config import NodeConfig, Surroundings, build_config, read_settings
from superfluid_noded.joiner import Joiner
from tests.unit.link.test_pki import issue
from tests.unit.noded.conftest import serving

AUTHORITY = keys_from_secrets((b"a" * 32,))


def config(**flags: Any) -> NodeConfig:
    given = {"model": "m", "engine": "mock"} | flags
    return build_config(read_settings(given, None), Surroundings(None, None, None, None))


def test_a_head_off_this_machine_is_joined_with_a_key_only() -> None:
    with pytest.raises(
        ConfigError, match=r"--join head\.example:8452: a head off this machine needs"
    ):
        config(join=("head.example",))
    assert config(join=("127.0.0.1",)).join == (("127.0.0.1", 8452),)
    for flags in ({"auth_file": "k"}, {"insecure_no_auth": True}):
        assert config(join=("head.example:9", "[2001:db8::1]"), **flags).join == (
            ("head.example", 9),
            ("2001:db8::1", 8452),
        )


def test_a_node_that_only_dials_listens_nowhere() -> None:
    found = config(join=("127.0.0.1",), listen=("off",))
    assert found.listen == ()
    assert found.identity.endswith("-8454")
    for flags in ({"listen": ("off",)}, {"listen": ("off", "127.0.0.1:1"), "join": ("127.0.0.1",)}):
        with pytest.raises(ConfigError, match="--listen off stands alone"):
            config(**flags)


def test_an_own_authority_excludes_a_key_and_no_key() -> None:
    files = {"fleet_ca": "a", "fleet_cert": "b", "fleet_cert_key": "c"}
    for flags in ({"auth_file": "k"}, {"insecure_no_auth": True}):
        with pytest.raises(ConfigError, match="--fleet-ca excludes"):
            config(**files, **flags)
    with pytest.raises(ConfigError, match="--fleet-cert-key is missing"):
        config(fleet_ca="a", fleet_cert="b")


def test_a_node_is_called_what_its_certificate_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = issue(tmp_path / "node", AUTHORITY, Role.NODE, "box-9")
    pki = ("--fleet-ca", files.ca, "--fleet-cert", files.certificate, "--fleet-cert-key", files.key)
    flags = [
        "--check",
        "--engine",
        "mock",
        "--model",
        "demo",
        "--listen",
        "off",
        "--join",
        "127.0.0.1",
        "--metrics",
        "127.0.0.1:0",
    ]
    assert run([*flags, *pki]) == 0
    shown = capsys.readouterr().out
    assert "off as box-9 (key own authority)" in shown
    assert "join     127.0.0.1:8452" in shown
    assert run([*flags, *pki, "--identity", "other"]) == 2
    assert "--identity is other, but the certificate's is box-9" in capsys.readouterr().err


def test_under_an_own_authority_each_node_mints_a_salt_and_says_it(tmp_path: Path) -> None:
    files = issue(tmp_path / "node", AUTHORITY, Role.NODE, "node-1")
    hello = Hello(MINOR, (), "head-1")

    async def main() -> list[bytes]:
        salts = []
        for keys in (files, files, AUTHORITY):
            async with serving(keys=keys, flags={"identity": "node-1"}) as rig:
                welcome = rig.node.agent.welcome(hello)
                salts.append(getattr(welcome, "salt", b"?"))
                assert repr(rig.node.agent.card).count("salt") == 0
        return salts

    first, second, by_key = asyncio.run(main())
    assert len(first) == len(second) == 32
    assert first != second
    assert by_key == b""  # both ends derive it from the key


def test_a_node_that_leaves_does_not_dial_any_more() -> None:
    async def main() -> None:
        async with serving(flags={"join": ("127.0.0.1:1",)}) as rig:
            joiner: Joiner = rig.node.joiner
            running = asyncio.create_task(joiner.run())
            async with asyncio.timeout(5):
                while joiner.refusals < 2:  # noqa: ASYNC110 # nothing listens there
                    await asyncio.sleep(0.01)
            rig.node.agent.drain(60_000)
            await asyncio.sleep(0.3)
            before = joiner.refusals
            await asyncio.sleep(0.6)
            assert joiner.refusals <= before + 1
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(main())
