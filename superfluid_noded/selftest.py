"""`superfluid selftest`: is what is installed here right, and how fast is it.

Owns the order of the parts and the exit status: kernels against plain torch over random shapes, whole engines against each other, then
speed, each engine in a process of its own beside vLLM and SGLang where they are installed. Exit 0: all that could be checked holds;
1: something does not; 3: the device cannot be used. Without a GPU the kernels run in Triton's interpreter.

`--seconds` bounds all of it: what has not begun by then is left out, and what does not return by itself, as a kernel that hangs, is ended with
the stacks of all threads on stderr.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from superfluid_core.clock import SECOND, Clock, SystemClock
from superfluid_core.errors import EngineError, SuperfluidError
from superfluid_core.logs import clean
from superfluid_noded.bench_peers import MEASURE_SECONDS, speed_lines
from superfluid_noded.config import settle_threads, settle_triton

if TYPE_CHECKING:
    import torch

    from superfluid_core.engine.torch.selftest.report import Check

PARTS = ("kernels", "engines", "speed")
EXIT_FAILED, EXIT_DEVICE = 1, 3
MESSAGE_CHARS_MAX = 500
SEEDS_SMALL, SEEDS_LARGE = 1, 8
HANG_SECONDS = 60  # that one check may take beyond the time for all


def _device(wanted: str) -> torch.device:
    """Settle the device, then how Triton is to treat kernels on it. Raises EngineError when it cannot be used."""
    from superfluid_core.engine.torch.device import Machine, choose_device

    device = choose_device(wanted, Machine())
    settle_triton(interpret=device.type != "cuda")
    if device.type == "cuda":
        _settle_cuda(device)
    return device


def _settle_cuda(device: torch.device) -> None:
    """Let this thread launch on that device, and products of float32 be those: some containers make them TF32."""
    import torch

    from superfluid_core.engine.torch.cuda.devices import use_device

    use_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False


class TimeLeft:
    """How much of the time for all checks is left; with no bound, enough for each."""

    def __init__(self, seconds: int | None, clock: Clock) -> None:
        self._clock = clock
        self._end_ns = None if seconds is None else clock.now_ns() + seconds * SECOND

    def seconds(self) -> float:
        """Say how much is left for one more."""
        if self._end_ns is None:
            return MEASURE_SECONDS
        return min(MEASURE_SECONDS, (self._end_ns - self._clock.now_ns()) / SECOND)


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
@click.option(
    "--seconds",
    type=click.IntRange(1, 86_400),
    help="For all of it; the rest is left out.  [default: no bound]",
)
def main(
    device: str,
    only: tuple[str, ...],
    seeds: int | None,
    model: str,
    is_json: bool,  # noqa: FBT001 - click passes it by name
    seconds: int | None,
) -> None:
    """Check every kernel and engine of this machine against plain torch, then measure."""
    settle_threads()
    parts = only or PARTS
    try:
        place = _device(device)
    except SuperfluidError as error:
        click.echo(f"superfluid selftest: {clean(error.message, MESSAGE_CHARS_MAX)}", err=True)
        raise SystemExit(EXIT_DEVICE if isinstance(error, EngineError) else 2) from None
    click.echo(json.dumps({"versions": versions(place)}))
    number = seeds or (SEEDS_LARGE if place.type == "cuda" else SEEDS_SMALL)
    left = TimeLeft(seconds, SystemClock())
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds + HANG_SECONDS, exit=True)
    counted = {"ok": 0, "failed": 0, "left out": 0}
    for check in _in_time(checks(place, parts, number), left):
        counted[check.verdict] += 1
        _show(check, is_json=is_json)
    is_measured = "speed" not in parts or _measure(model, str(place), left)
    faulthandler.cancel_dump_traceback_later()
    click.echo(json.dumps({"checks": counted}))
    raise SystemExit(EXIT_FAILED if counted["failed"] or not is_measured else 0)


def _in_time(found: Iterator[Check], left: TimeLeft) -> Iterator[Check]:
    """Give checks until the time is over; what would have followed is one that was left out."""
    from superfluid_core.engine.torch.selftest.report import Check

    for check in found:
        yield check
        if left.seconds() <= 0:
            yield Check("whatever else there is to check", "left out", "the time is over")
            return


def _measure(model: str, device: str, left: TimeLeft) -> bool:
    """Print figures of speed, if there is time; whether our own engine gave some."""
    seconds = left.seconds()
    if seconds <= 0:
        click.echo(json.dumps({"engine": "native", "left out": "the time is over"}))
        return True
    is_measured = True
    for line in speed_lines(model, device, seconds):
        is_measured = is_measured and (line.get("engine") != "native" or "error" not in line)
        click.echo(json.dumps(line))
    return is_measured


if __name__ == "__main__":
    main()
