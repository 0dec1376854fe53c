"""The systemd units and deployment files: what they must say, and systemd's own word on them where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from superfluid_core.limits import HttpLimits, LinkLimits
from superfluid_core.options import merge
from superfluid_head import supervisor as head_supervisor
from superfluid_head.config import OPTIONS as HEAD_OPTIONS
from superfluid_noded import supervisor as node_supervisor
from superfluid_noded.config import OPTIONS as NODE_OPTIONS
from tests.deploy.supervision import ROOT, UNITS, settings

SERVICES = ("superfluid-head.service", "superfluid-noded@.service")
EXPOSED = {"superfluid-head.service": 15, "superfluid-noded@.service": 18}
"""The most that systemd-analyze may count, in tenths. Version 252 counts 11 and 16."""
DRAIN_MS = HttpLimits().drain_ms
STOPS_MS = {
    "superfluid-head.service": DRAIN_MS + head_supervisor.STOP_MARGIN_MS,
    "superfluid-noded@.service": DRAIN_MS + node_supervisor.STOP_MARGIN_MS,
}
PROTECTING = {
    "PrivateDevices", "PrivateUsers", "PrivateTmp", "PrivateMounts", "ProcSubset", "MemoryDenyWriteExecute", "NoNewPrivileges",
    "CapabilityBoundingSet", "RestrictAddressFamilies", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID",
    "LockPersonality", "KeyringMode", "SystemCallArchitectures", "SystemCallFilter", "UMask", "ProtectSystem", "ProtectHome",
    "ProtectClock", "ProtectHostname", "ProtectKernelTunables", "ProtectKernelModules", "ProtectKernelLogs",
    "ProtectControlGroups", "ProtectProc",
}  # fmt: skip


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_tells_systemd_when_it_serves_and_has_time_to_drain(name: str) -> None:
    unit = settings(name)
    assert unit["Type"] == ["notify"]
    assert int(unit["TimeoutStopSec"][0]) * 1000 >= STOPS_MS[name]
    assert unit["RestartPreventExitStatus"] == ["2 3"]


@pytest.mark.parametrize("name", SERVICES)
def test_the_key_reaches_a_service_as_a_credential_and_never_as_text(name: str) -> None:
    unit = settings(name)
    assert unit["LoadCredential"] == ["fleet.key:/etc/superfluid/fleet.key"]
    assert "${CREDENTIALS_DIRECTORY}/fleet.key" in unit["ExecStart"][0]
    assert "fk1:" not in (UNITS / name).read_text(encoding="utf-8")
    assert unit["NoNewPrivileges"] == ["yes"]
    assert unit["User"] == ["superfluid"]


def installed(folder: Path) -> list[Path]:
    """Copy the units as an installed host has them: instances named, and programs that exist."""
    for name in (*SERVICES, "superfluid.target"):
        text = (UNITS / name).read_text(encoding="utf-8")
        text = text.replace("/opt/superfluid/bin/superfluid-noded", "/bin/true")
        text = text.replace("/opt/superfluid/bin/superfluid", "/bin/true")
        (folder / name.replace("@.", "@0.")).write_text(text, encoding="utf-8")
    return sorted(folder.iterdir())


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=50, check=False
    )


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    run = analyze("verify", "--man=no", *map(str, installed(tmp_path)))
    complaints = [line for line in run.stderr.splitlines() if str(tmp_path) in line]
    assert not complaints, complaints


def test_systemd_would_find_what_is_wrong(tmp_path: Path) -> None:
    installed(tmp_path)
    unit = tmp_path / "superfluid-head.service"
    unit.write_text(unit.read_text() + "\n[Service]\nWatchDog=3\n", encoding="utf-8")
    run = analyze("verify", "--man=no", str(unit))
    assert "WatchDog" in run.stderr
    assert str(unit) in run.stderr


@pytest.mark.parametrize(("name", "tenths_max"), EXPOSED.items())
def test_a_unit_is_exposed_no_more_than_it_has_to_be(
    tmp_path: Path, name: str, tenths_max: int
) -> None:
    installed(tmp_path)
    path = str(tmp_path / name.replace("@.", "@0."))
    run = analyze("security", "--offline=true", "--no-pager", f"--threshold={tenths_max}", path)
    assert run.returncode == 0, run.stdout[-200:]


def test_what_a_node_lacks_of_a_heads_protection_has_its_reason_beside_it() -> None:
    head, node = (settings(name) for name in SERVICES)
    text = (UNITS / "superfluid-noded@.service").read_text(encoding="utf-8")
    reasons = text.partition("# What a head has and a node cannot")[2]
    differing = [
        key for key in head if key in PROTECTING and head[key] != node.get(key) and key != "UMask"
    ]
    assert {"PrivateDevices", "MemoryDenyWriteExecute", "SystemCallFilter"} <= set(differing)
    assert not [key for key in differing if f"# {key}" not in reasons]


@pytest.mark.parametrize("name", SERVICES)
def test_a_hang_leaves_its_stack_in_the_journal_and_no_core(name: str) -> None:
    unit = settings(name)
    assert "PYTHONFAULTHANDLER=1" in unit["Environment"]
    assert unit["LimitCORE"] == ["0"]
    assert "WatchdogSec" in unit


def test_a_watchdog_waits_longer_than_a_step_may_take() -> None:
    watchdog_s = int(settings("superfluid-noded@.service")["WatchdogSec"][0])
    assert watchdog_s * 1000 >= 4 * LinkLimits().engine_hung_ms


def test_users_and_folders_are_made_as_the_units_need_them(tmp_path: Path) -> None:
    if shutil.which("systemd-sysusers") is None or shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd is not installed")
    (tmp_path / "etc").mkdir()
    for tool, kind in (("systemd-sysusers", "sysusers"), ("systemd-tmpfiles", "tmpfiles")):
        words = [tool, f"--root={tmp_path}", *(["--create"] if kind == "tmpfiles" else []), "-"]
        given = (UNITS / f"superfluid.{kind}.conf").read_text(encoding="utf-8")
        run = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=20, check=False
        )
        assert run.returncode == 0, run.stderr
    assert re.search(r"^superfluid:", (tmp_path / "etc/passwd").read_text(), re.M)
    groups = (tmp_path / "etc/group").read_text()
    for group in settings("superfluid-noded@.service")["SupplementaryGroups"][0].split():
        assert re.search(rf"^{group}:", groups, re.M)
    assert (tmp_path / "var/lib/superfluid/models").stat().st_mode & 0o777 == 0o750


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
