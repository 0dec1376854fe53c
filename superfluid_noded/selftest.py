"""`superfluid selftest`: is what is installed here right, and how fast is it.

Owns the order of the parts and the exit status: kernels against plain torch over random shapes, whole engines against each other, then
speed, each engine in a process of its own beside vLLM and SGLang where they are installed. Exit 0: all that could be checked holds;
1: something does not; 3: the device cannot be used. Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from superfluid_core.errors import EngineError, SuperfluidError
from superfluid_core.logs import clean
from superfluid_noded.bench_peers import speed_lines
from superfluid_noded.config import settle_threads, settle_triton

if TYPE_CHECKING:
    import torch

    from superfluid_core.engine.torch.selftest.report import Check

PARTS = ("kernels", "engines", "speed")
EXIT_FAILED, EXIT_DEVICE = 1, 3
MESSAGE_CHARS_MAX = 500
SEEDS_SMALL, SEEDS_LARGE = 1, 8


def _device(wanted: str) -> torch.device:
    """Settle the device, then how Triton is to treat kernels on it. Raises EngineError when it cannot be used."""
    from superfluid_core.engine.torch.device import Machine, choose_device

    device = choose_device(wanted, Machine())
    settle_triton(interpret=device.type != "cuda")
    return device


def versions(device: torch.device) -> dict[str, str]:
    """Say what is installed, and what the device is."""
    import importlib.metadata

    import torch

    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "device": str(device)}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
    for name in ("triton", "flashinfer-python", "vllm", "sglang"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def checks(device: torch.device, parts: Sequence[str], seeds: int) -> Iterator[Check]:
    """Run the parts that check; `seeds` counts the random scenes of every dtype."""
    import torch

    from superfluid_core.engine.torch.selftest.engines import engine_checks
    from superfluid_core.engine.torch.selftest.kernels import Bench, kernel_checks
    from superfluid_core.engine.torch.selftest.model import TinySizes
    from superfluid_core.engine.torch.selftest.products import product_checks

    is_small = device.type != "cuda"
    dtypes = [torch.float32, torch.float16] + ([] if is_small else [torch.bfloat16])
    if "kernels" in parts:
        for seed in range(1, seeds + 1):
            for dtype in dtypes:
                bench = Bench(device, dtype, seed)
                yield from kernel_checks(bench)
                yield from product_checks(bench)
    if "engines" in parts:
        small = TinySizes(300, 64, 96, 1, 2, 1, 16, 256)
        with tempfile.TemporaryDirectory() as directory:
            yield from engine_checks(device, Path(directory), small if is_small else TinySizes())


def _show(check: Check, *, is_json: bool) -> None:
    if is_json:
        click.echo(json.dumps(asdict(check)))
    else:
        click.echo(f"{check.verdict:<9} {check.name:<50} {clean(check.detail, MESSAGE_CHARS_MAX)}")
    sys.stdout.flush()


@click.command()
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Parts; all by default.")
@click.option(
    "--seeds",
    type=click.IntRange(1, 1000),
    help="Random scenes a dtype.  [default: 8 on a GPU, else 1]",
)
@click.option("--model", default="demo", show_default=True, help="What the speed is measured with.")
@click.option("--json", "is_json", is_flag=True, help="JSON lines.")
def main(device: str, only: tuple[str, ...], seeds: int | None, model: str, is_json: bool) -> None:  # noqa: FBT001 - click passes it by name
    """Check every kernel and engine of this machine against plain torch, then measure."""
    settle_threads()
    parts = only or PARTS
    try:
        place = _device(device)
    except SuperfluidError as error:
        click.echo(f"superfluid selftest: {clean(error.message, MESSAGE_CHARS_MAX)}", err=True)
        raise SystemExit(EXIT_DEVICE if isinstance(error, EngineError) else 2) from None
    click.echo(json.dumps({"versions": versions(place)}))
    counted = {"ok": 0, "failed": 0, "left out": 0}
    number = seeds or (SEEDS_LARGE if place.type == "cuda" else SEEDS_SMALL)
    for check in checks(place, parts, number):
        counted[check.verdict] += 1
        _show(check, is_json=is_json)
    is_measured = True
    if "speed" in parts:
        for line in speed_lines(model, str(place)):
            is_measured = is_measured and (line.get("engine") != "native" or "error" not in line)
            click.echo(json.dumps(line))
    click.echo(json.dumps({"checks": counted}))
    raise SystemExit(EXIT_FAILED if counted["failed"] or not is_measured else 0)


if __name__ == "__main__":
    main()
