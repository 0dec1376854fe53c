"""`superfluid bench`: the commands, their flags, and nothing else.

The heavy parts are imported inside the commands, so that the head starts without them. Figures go to standard output: a JSON
line per round, a table at the end. Exit 0 means that everything asked for completed, 1 that something did not, 3 that it could not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import click

START_FAILED = 3


@click.group(help="Measure a running server, failover, or the engine beside others.")
def bench() -> None:
    """Gather the benches."""


@bench.command("serve")
@click.option("--url", required=True, metavar="URL", help="Base URL, without /v1.")
@click.option("--model", required=True, help="Model name to ask for.")
@click.option("--concurrency", default=(1, 8), multiple=True, show_default=True)
@click.option("--requests", default=16, show_default=True, help="Requests per round.")
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--words", default=64, show_default=True, help="Words per prompt, all different.")
@click.option("--rounds", default=3, show_default=True, help="Counted rounds; one more warms up.")
@click.option("--seed", default=1, show_default=True)
def serve(url: str, model: str, concurrency: tuple[int, ...], **numbers: int) -> None:
    """Load a server with streaming chats; the key is read from SUPERFLUID_API_KEY."""
    from superfluid_core.clock import SystemClock
    from superfluid_head.bench.serve import ServeBench, run_serve

    api_key = os.environ.get("SUPERFLUID_API_KEY")
    plan = ServeBench(url.rstrip("/"), model, concurrency, api_key=api_key, **numbers)
    raise SystemExit(0 if run_serve(plan, SystemClock(), click.echo) else 1)


@bench.command("failover")
@click.option("--engine", type=click.Choice(["mock", "native"]), default="mock", show_default=True)
@click.option("--runs", default=20, show_default=True, help="Kills.")
@click.option("--max-tokens", default=64, show_default=True, help="Length of each answer.")
@click.option("--model", default="demo", show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--dtype", default="auto", show_default=True, help="Of the native engine.")
def failover(**plan: Any) -> None:
    """Kill the serving node at random tokens and compare with the unbroken answers."""
    from superfluid_head.bench.failover import FailoverBench, run_failover, summary
    from superfluid_head.bench.rig import RigError

    bench_plan = FailoverBench(**plan)
    try:
        done = run_failover(bench_plan, click.echo)
    except RigError as error:
        click.echo(f"superfluid: {error}", err=True)
        raise SystemExit(START_FAILED) from None
    click.echo("\n" + summary(bench_plan, done))
    is_exact = bench_plan.engine == "mock"
    good = all(r.is_complete and (r.differs_at is None or not is_exact) for r in done)
    raise SystemExit(0 if good else 1)


@bench.command("engine")
@click.option(
    "--model", default="demo", show_default=True, help="A directory, GGUF file or hub id."
)
@click.option(
    "--record-costs", required=True, metavar="FILE", help="For `simulate`, as measured(FILE)."
)
@click.option("--threads", default=0, show_default="all cores", help="Threads of the engine.")
@click.option("--repeats", default=5, show_default=True, help="Of every step; the median counts.")
def engine(model: str, record_costs: str, threads: int, repeats: int) -> None:
    """Measure what a step of the native engine costs, by lanes, prompt tokens and context."""
    command = [sys.executable, "-m", "superfluid_noded.bench_engine", "--model", model]
    command += ["--threads", str(threads or os.cpu_count() or 1), "--repeats", str(repeats)]
    done = subprocess.run([*command, "--record-costs", record_costs], check=False)
    raise SystemExit(START_FAILED if done.returncode else 0)


@bench.command("compare")
@click.option("--model", default="demo", show_default=True, help="A GGUF file, or demo.")
@click.option("--rounds", default=3, show_default=True, help="Counted rounds; one more warms up.")
@click.option("--tokens", default=64, show_default=True, help="Tokens decoded per stream.")
@click.option("--prefill", default=512, show_default=True, help="Tokens of the prefill measure.")
@click.option("--threads", default=0, show_default="all cores", help="Threads of every engine.")
@click.option("--only", multiple=True, metavar="NAME", help="native, llama-server, transformers.")
def compare(model: str, only: tuple[str, ...], **numbers: int) -> None:
    """Measure our engine beside llama-server and transformers, interleaved, in one run."""
    from superfluid_head.bench.compare import CompareBench, CompareError, run_compare

    try:
        is_whole = run_compare(CompareBench(model, only=only, **numbers), click.echo)
    except CompareError as error:
        click.echo(f"superfluid: {error}", err=True)
        raise SystemExit(START_FAILED) from None
    raise SystemExit(0 if is_whole else 1)
