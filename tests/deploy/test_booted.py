"""systemd itself runs the units: a head and two nodes, ready, a hung engine restarted while its answer goes on, drained, stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from superfluid_core.limits import LinkLimits
from superfluid_core.link.keys import load_keys, write_key_file
from tests.deploy.boot import Booted, booted, why_not

HEAD, NODES = (
    "superfluid-head.service",
    ("superfluid-noded@0.service", "superfluid-noded@1.service"),
)
WATCHDOG = "WatchdogSec=6"
HUNG_S = LinkLimits().engine_hung_ms / 1000
HANG = {"match": "stillwaterton", "fault": "hang", "fault_at": 5}


def files(folder: Path) -> dict[str, str]:
    write_key_file(folder / "fleet.key")
    return {
        "fleet.key": (folder / "fleet.key").read_text(),
        "head.toml": 'fleet = ["127.0.0.1:8454", "127.0.0.1:8455"]\nhttp = ["127.0.0.1:8453"]\n'
        'placement = "round-robin"\n',
        "noded.toml": 'model = "demo"\nengine = "mock"\nmock-rates = "prefill=0,decode=200"\nmock-eos = 0\n',
        "noded-0.env": "SUPERFLUID_LISTEN=127.0.0.1:8454\nSUPERFLUID_MOCK_SCRIPT=/etc/superfluid/hang.jsonl\n",
        "noded-1.env": "SUPERFLUID_LISTEN=127.0.0.1:8455\n",
        "hang.jsonl": json.dumps(HANG) + "\n",
        "wrong.toml": "fleeet = 3\n",
    }


def is_active(said: dict[str, str]) -> bool:
    return said["ActiveState"] == "active"


def ask(system: Booted, words: str) -> str:
    body = {"model": "SmolLM2-135M-Instruct", "max_tokens": 40,
            "messages": [{"role": "user", "content": words}]}  # fmt: skip
    choice = system.post("/v1/chat/completions", body)["choices"][0]
    assert choice["finish_reason"] in ("length", "stop")
    return str(choice["message"]["content"])


def hang_the_first(system: Booted) -> None:
    """Ask until the request has met node 0: it hangs there and is answered all the same, by node 1."""
    for _ in range(4):
        began = time.monotonic()
        ask(system, "Is it stillwaterton?")
        if time.monotonic() - began > HUNG_S - 1:
            return
    raise AssertionError("no request met the node that hangs")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_systemd_starts_the_units_restarts_a_hung_engine_and_drains_them(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    given = files(tmp_path)
    drop_ins = dict.fromkeys((HEAD, *NODES), WATCHDOG)
    with booted(tmp_path, given, drop_ins) as system:
        for unit in (HEAD, *NODES):
            said = system.until(unit, is_active)
            assert said["SubState"] == "running"
            assert said["NRestarts"] == "0"
        key = load_keys(tmp_path / "fleet.key").key_id
        assert f"(key {key})" in system.log(NODES[0])
        system.until(HEAD, lambda said: "2 of 2 nodes up" in said["StatusText"])
        ask(system, "Hello")

        hang_the_first(system)
        said = system.until(NODES[0], lambda said: said["NRestarts"] == "1" and is_active(said))
        assert "engine/sim.py" in system.log(NODES[0])
        assert system.show(NODES[1])["NRestarts"] == "0"
        assert system.show(HEAD)["NRestarts"] == "0"
        system.until(HEAD, lambda said: "2 of 2 nodes up" in said["StatusText"])

        system.run("systemctl", "stop", "superfluid.target")
        for unit in (HEAD, *NODES):
            said = system.until(unit, lambda said: said["ActiveState"] == "inactive")
            assert (said["Result"], said["ExecMainStatus"]) == ("success", "0")
        assert "draining" in system.log(NODES[1])

        (system.stage / "etc-superfluid/head.toml").write_text(given["wrong.toml"])
        system.run("systemctl", "start", HEAD, check=False)
        said = system.until(HEAD, lambda said: said["ActiveState"] == "failed")
        assert (said["ExecMainStatus"], said["NRestarts"]) == ("2", "0")
