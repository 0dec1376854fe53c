"""`superfluid inspect`: hands its arguments to the node's program, which has torch, and its exit status back.

Owns nothing of the report: the head imports no engine.
"""

from __future__ import annotations

import subprocess
import sys

import click


@click.command("inspect")
@click.argument("model")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help="Of weights and KV.")
@click.option("--offline", is_flag=True, help="Ask no hub.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object.")
def inspect(model: str, device: str, dtype: str, *, offline: bool, is_json: bool) -> None:
    """Say what is understood of MODEL and how it would run here; loads nothing."""
    command = [sys.executable, "-m", "superfluid_noded.cli", "inspect"]
    command += [f"--device={device}", f"--dtype={dtype}"]
    command += ["--offline"] if offline else []
    command += ["--json"] if is_json else []
    raise SystemExit(subprocess.run([*command, "--", model], check=False).returncode)
