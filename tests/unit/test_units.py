"""The systemd units and deployment files: what they must say, and systemd's own word on them where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from superfluid_core.options import merge
from superfluid_head.config import OPTIONS as HEAD_OPTIONS
from superfluid_noded.config import OPTIONS as NODE_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "systemd"
SERVICES = {
    "superfluid-head.service": "superfluid_head",
    "superfluid-noded@.service": "superfluid_noded",
}
DRAIN_SECONDS = 30


def settings(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text(encoding="utf-8").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_tells_systemd_when_it_serves_and_has_time_to_drain(name: str) -> None:
    unit = settings(name)
    assert unit["Type"] == ["notify"]
    assert int(unit["TimeoutStopSec"][0]) > DRAIN_SECONDS
    assert unit["RestartPreventExitStatus"] == ["2 3"]


@pytest.mark.parametrize(("name", "package"), SERVICES.items())
def test_exactly_the_programs_that_feed_a_watchdog_have_one(name: str, package: str) -> None:
    feeds = any(
        "WATCHDOG" in path.read_text("utf-8") for path in (ROOT / package).glob("server.py")
    )
    assert ("WatchdogSec" in settings(name)) == feeds


@pytest.mark.parametrize("name", SERVICES)
def test_the_key_reaches_a_service_as_a_credential_and_never_as_text(name: str) -> None:
    unit = settings(name)
    assert unit["LoadCredential"] == ["fleet.key:/etc/superfluid/fleet.key"]
    assert "${CREDENTIALS_DIRECTORY}/fleet.key" in unit["ExecStart"][0]
    assert "fk1:" not in (UNITS / name).read_text(encoding="utf-8")
    assert unit["NoNewPrivileges"] == ["yes"]
    assert unit["User"] == ["superfluid"]


@pytest.mark.slow
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return  # a machine without systemd has nothing to ask
    for name in (*SERVICES, "superfluid.target"):
        text = (UNITS / name).read_text(encoding="utf-8")
        # verify wants the executables to exist, which only an installed host has
        text = text.replace("/opt/superfluid/bin/superfluid-noded", "/bin/true")
        text = text.replace("/opt/superfluid/bin/superfluid", "/bin/true")
        (tmp_path / name.replace("@.", "@0.")).write_text(text, encoding="utf-8")
    names = sorted(str(path) for path in tmp_path.iterdir())
    run = subprocess.run(
        [analyze, "verify", "--man=no", *names],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    complaints = [line for line in run.stderr.splitlines() if str(tmp_path) in line]
    assert not complaints, complaints


def test_the_example_configurations_are_accepted_by_their_programs() -> None:
    for name, options in (("head.toml", HEAD_OPTIONS), ("noded.toml", NODE_OPTIONS)):
        text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
        # as it stands, and with what it shows in comments
        for each in (text, re.sub(r"^# (?=[a-z-]+ = )", "", text, flags=re.MULTILINE)):
            toml = tomllib.loads(each)
            settings = merge(options, {}, {}, toml)
            assert sum(setting.source == "toml" for setting in settings.values()) == len(toml) > 5


def test_each_gpu_has_ports_of_its_own(tmp_path: Path) -> None:
    subprocess.run(
        [str(ROOT / "deploy" / "noded-env"), "0", "3"],
        env={"FOLDER": str(tmp_path), "PATH": "/usr/bin:/bin"},
        check=True, timeout=20, capture_output=True,
    )  # fmt: skip
    assert (tmp_path / "noded-3.env").read_text() == ("SUPERFLUID_LISTEN=0.0.0.0:8457\n")
    assert "0.0.0.0:8454" in (tmp_path / "noded-0.env").read_text()


def test_noded_env_refuses_what_is_no_index(tmp_path: Path) -> None:
    run = subprocess.run(
        [str(ROOT / "deploy" / "noded-env"), "../x"],
        env={"FOLDER": str(tmp_path), "PATH": "/usr/bin:/bin"},
        timeout=20, capture_output=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert not list(tmp_path.iterdir())
