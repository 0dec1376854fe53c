"""`superfluid selftest`: hands its arguments to the node's program, which has torch, and its exit status back.

Owns nothing of the test: the head imports no engine.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import click

PARTS = ("kernels", "engines", "speed")


@click.command("selftest")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Parts; all by default.")
@click.option("--seeds", type=click.IntRange(1, 1000), help="Random scenes of every dtype.")
@click.option("--model", default="demo", show_default=True, help="What the speed is measured with.")
@click.option("--json", "is_json", is_flag=True, help="JSON lines.")
@click.option(
    "--seconds", type=click.IntRange(1, 86_400), help="For all of it; the rest is left out."
)
def selftest(
    only: tuple[str, ...], seeds: int | None, seconds: int | None, *, is_json: bool, **texts: Any
) -> None:
    """Check every kernel and engine of this machine against plain torch, then measure."""
    command = [sys.executable, "-m", "superfluid_noded.selftest"]
    command += [f"--{name}={text}" for name, text in texts.items()]
    command += [f"--only={part}" for part in only]
    numbers = {"seeds": seeds, "seconds": seconds}
    command += [f"--{name}={number}" for name, number in numbers.items() if number is not None]
    command += ["--json"] if is_json else []
    raise SystemExit(subprocess.run(command, check=False).returncode)
