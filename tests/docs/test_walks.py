"""The texts that a reader follows with his own hands, followed: every `sh` block, in one shell, from top to bottom.

Ports in the texts are the real ones, so each walk has a network of its own (loopback alone), and processes of its own, which end with it. The
nodes' engine is the simulated one, by the environment: what is tried here are the commands. It never draws an end: one answer in five hundred would
be empty.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
OPENING = "set -euo pipefail\nip link set lo up\n"
SECONDS_MAX = 150
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "curl"))),
    reason="needs root, unshare, ip and curl",
)


def blocks_of(name: str) -> list[str]:
    return BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))


def walk(blocks: list[str], folder: Path) -> str:
    """Run the blocks; what they print. Fails with it when a command fails."""
    binaries = folder / "bin"
    binaries.mkdir()
    for program, module in (("superfluid", "head"), ("superfluid-noded", "noded")):
        path = binaries / program
        call = f"from superfluid_{module}.cli import main\nmain()\n"
        path.write_text(f"#!{sys.executable}\n{call}")
        path.chmod(0o755)
    environment = {
        "PATH": f"{binaries}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "SUPERFLUID_ENGINE": "mock",
        "SUPERFLUID_MOCK_EOS": "0",
        "OMP_NUM_THREADS": "1",
    }
    script = OPENING + "\n".join(blocks)
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        [*command, "bash", "-c", script],
        check=False,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    logs = "".join(f"\n--- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*.log")))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}{logs}"
    return done.stdout


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX + 30)
def test_the_ten_minutes_are_as_they_are_told(tmp_path: Path) -> None:
    blocks = blocks_of("quickstart.md")
    told = walk(blocks, tmp_path)
    assert len(blocks) > 8
    assert "chat.completion.chunk" in told
    assert "node-a" in told
    assert "node-b" in told
    story = (tmp_path / "story.txt").read_text()
    assert story.strip()


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX + 30)
def test_what_an_operator_does_can_be_done(tmp_path: Path) -> None:
    start = [block for block in blocks_of("quickstart.md") if "fleet" in block][:3]
    assert "superfluid fleet key" in start[0]
    assert "superfluid-noded" in start[1]
    assert "superfluid serve" in start[2]
    told = walk([*start, *blocks_of("operating.md")], tmp_path)
    assert told.count("node-a") > 2
    lines = (tmp_path / "both-new-first.key").read_text().splitlines()
    assert lines == (tmp_path / "both-old-first.key").read_text().splitlines()[::-1]


def test_what_troubleshooting_quotes_is_said_somewhere() -> None:
    table = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+)", table, re.M)
    words = [word for cell in quoted for word in re.findall(r"`([^`]+)`", cell)]
    packages = (ROOT / name for name in ("superfluid_core", "superfluid_head", "superfluid_noded"))
    source = "".join(
        path.read_text("utf-8") for folder in packages for path in sorted(folder.rglob("*.py"))
    )
    missing = [word for word in words if word not in source and not word.startswith("superfluid_")]
    assert not missing
    assert len(words) > 15
