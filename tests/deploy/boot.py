"""Boots systemd in namespaces of its own and lets it run the units of this repository, hardening and all.

Nothing of the machine is touched: mounts, processes, network (loopback alone), names and control groups are the namespaces' own, `/etc` and
`/opt` show a stage folder there, and everything ends with the one process that was started. It needs root, `unshare`,
`nsenter`, systemd and a cgroup2 mount; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.supervision import ROOT, SECONDS, UNITS

INIT = Path("/lib/systemd/systemd")
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "umount", "final", "default")
PROGRAMS = {"superfluid": "superfluid_head.cli", "superfluid-noded": "superfluid_noded.cli"}
DIRECTORIES = ("etc-systemd/system", "units", "etc-superfluid", "opt/superfluid/bin", "root/etc",
               "opt/python", "opt/site", "opt/source")  # fmt: skip
SHOWN = ("ActiveState", "SubState", "Result", "ExecMainStatus", "NRestarts", "StatusText")
ENTER = """
set -eu
stage=$1
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/log /run/lock /etc/superfluid /etc/systemd
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount --bind "$2" "$stage/opt/python"
mount --bind "$3" "$stage/opt/site"
mount --bind "$4" "$stage/opt/source"
mount --rbind "$stage/opt" /opt
mount --bind "$stage/etc-systemd" /etc/systemd
mount --bind "$stage/units" /usr/lib/systemd/system
mount --bind "$stage/etc-superfluid" /etc/superfluid
mount --bind "$stage/root/etc/passwd" /etc/passwd
mount --bind "$stage/root/etc/group" /etc/group
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs tmpfs /var/cache
# credentials are mounted by a process of their own, and shared from there
mount --make-rshared /
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --system --log-target=console --log-level=info --show-status=no
"""


def cgroup2() -> Path | None:
    """Find the control group of this process in the unified hierarchy."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    points = [fields[1] for fields in mounts if fields[2] == "cgroup2"]
    own = [
        line[3:]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.startswith("0::")
    ]
    return Path(points[0] + own[0]) if points and own else None


def why_not() -> str | None:
    """Say what this machine lacks for it, or None."""
    if os.geteuid() != 0:
        return "needs root to make namespaces"
    missing = [name for name in ("unshare", "nsenter", "systemctl") if shutil.which(name) is None]
    if missing or not INIT.exists():
        return f"needs {', '.join(missing) or INIT}"
    if cgroup2() is None:
        return "needs a cgroup2 mount"
    flags = ("--pid", "--fork", "--mount", "--uts", "--ipc", "--net", "--cgroup")
    tried = subprocess.run(
        ["unshare", *flags, "mount", "-t", "proc", "proc", "/proc"],
        capture_output=True, check=False, timeout=SECONDS, text=True,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"namespaces are refused: {tried.stderr.strip()}"


@dataclass
class Booted:
    """A running system; `stage` holds what its /etc/superfluid is."""

    stage: Path
    pid: int

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command inside, as root; returns what it prints."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-m", "-p", "-n", "-C", "-u", "-i", *command],
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, unit: str) -> dict[str, str]:
        lines = self.run("systemctl", "show", unit).splitlines()
        return {key: value for key, _, value in (line.partition("=") for line in lines)}

    def until(self, unit: str, holds: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        end = time.monotonic() + SECONDS
        while not holds(said := self.show(unit)):
            shown = {key: said.get(key) for key in SHOWN}
            assert time.monotonic() < end, f"{unit}: {shown}\n{self.log(unit)[-2_000:]}"
            time.sleep(0.2)
        return said

    def log(self, unit: str) -> str:
        return self.run("cat", f"/run/log/{unit}.log", check=False)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the head from inside its network."""
        code = (
            "import sys, httpx; r = httpx.post(sys.argv[1], content=sys.argv[2], timeout=30, trust_env=False,"
            " headers={'content-type': 'application/json'}); print(r.text); sys.exit(not r.is_success)"
        )
        url = f"http://127.0.0.1:8453{path}"
        answer: dict[str, Any] = json.loads(
            self.run(sys.executable, "-c", code, url, json.dumps(body))
        )
        return answer


def lay_out(stage: Path, files: Mapping[str, str], drop_ins: Mapping[str, str]) -> None:
    """Put the units and what they need where the system will look."""
    for name in DIRECTORIES:
        (stage / name).mkdir(parents=True)
    for name in ("passwd", "group", "shadow", "gshadow"):
        with contextlib.suppress(OSError):
            shutil.copy(f"/etc/{name}", stage / "root/etc")
    sysusers = (UNITS / "superfluid.sysusers.conf").read_text(encoding="utf-8")
    subprocess.run(
        ["systemd-sysusers", f"--root={stage / 'root'}", "-"],
        input=sysusers, text=True, check=True, capture_output=True, timeout=SECONDS,
    )  # fmt: skip
    for name in TARGETS:
        text = f"[Unit]\nDescription={name}\nDefaultDependencies=no\n"
        text += "Wants=superfluid.target\n" if name == "default" else ""
        (stage / f"units/{name}.target").write_text(text)
    for path in (*UNITS.glob("*.service"), *UNITS.glob("*.target")):
        shutil.copy(path, stage / "units")
    wanted = stage / "units/superfluid.target.wants"
    wanted.mkdir()
    for unit, extra in drop_ins.items():
        template = unit if "@" not in unit else unit.partition("@")[0] + "@.service"
        (wanted / unit).symlink_to(f"../{template}")
        folder = stage / f"units/{unit}.d"
        folder.mkdir()
        log = f"append:/run/log/{unit}.log"
        text = f"[Service]\nStandardOutput={log}\nStandardError={log}\n{extra}\n"
        (folder / "test.conf").write_text(text)
    for program, module in PROGRAMS.items():
        path = stage / "opt/superfluid/bin" / program
        path.write_text(
            "#!/bin/sh\nexport LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/source:/opt/site\n"
            f'exec /opt/python/bin/python3 -m {module} "$@"\n'
        )
        path.chmod(0o755)
    for name, content in files.items():
        (stage / "etc-superfluid" / name).write_text(content, encoding="utf-8")
        (stage / "etc-superfluid" / name).chmod(0o600 if name.endswith(".key") else 0o644)


@contextlib.contextmanager
def booted(folder: Path, files: Mapping[str, str], drop_ins: Mapping[str, str]) -> Iterator[Booted]:
    """Boot with these files in /etc/superfluid and these units, each with more settings; ends everything."""
    stage = folder / "stage"
    lay_out(stage, files, drop_ins)
    parent = cgroup2()
    assert parent is not None
    group = parent / f"superfluid-test-{os.getpid()}"
    group.mkdir()
    namespaces = ("--pid", "--fork", "--mount", "--uts", "--ipc", "--net", "--cgroup")
    join = f'echo $$ >"{group}/cgroup.procs" && exec "$@"'
    inside = (sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT))
    with (folder / "boot.log").open("w") as log:
        outer = subprocess.Popen(
            ["sh", "-c", join, "sh", "unshare", *namespaces, "--kill-child", "sh", "-c", ENTER, "sh", str(stage), *inside],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield Booted(stage, _init_of(outer, folder / "boot.log"))
    finally:
        outer.kill()
        outer.wait()
        _clear(group)


def _init_of(outer: subprocess.Popen[bytes], log: Path) -> int:
    """Wait until systemd answers; returns its process id outside."""
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and outer.poll() is None:
        found = children.read_text().split()
        if found and Path(f"/proc/{found[0]}/comm").read_text().strip() == "systemd":
            socket = Path("/proc", found[0], "root", "run/systemd/private")
            if socket.exists():
                return int(found[0])
        time.sleep(0.05)
    raise AssertionError(f"systemd did not come up: {log.read_text()}")


def _clear(group: Path) -> None:
    """Remove the control groups, once the kernel has ended what was in them."""
    end = time.monotonic() + SECONDS
    while group.exists() and time.monotonic() < end:
        for path in sorted(group.rglob("*/"), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()
        with contextlib.suppress(OSError):
            group.rmdir()
        time.sleep(0.05)
