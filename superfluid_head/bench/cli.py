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
LIBRARIES = ("llamacpp", "mlx")
ENGINES = ("mock", "native", *LIBRARIES)


@click.group(help="Measure a running server, whole scenarios, or the engine beside others.")
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


@bench.command("scenario")
@click.argument("name", metavar="NAME|list")
@click.option("--base-url", metavar="URL", help="A server that runs already, with or without /v1.")
@click.option("--model", default="demo", show_default=True, help="What to serve, or to ask for.")
@click.option("--key-file", metavar="FILE", help="API key of that server.")
@click.option("--rounds", type=click.IntRange(1), help="Counted rounds.  [default: the scenario's]")
@click.option("--streams", type=click.IntRange(1), help="Requests at once.  [default: its own]")
@click.option("--engine", type=click.Choice(ENGINES), help="Of our nodes.")
@click.option("--dtype", default="auto", show_default=True, help="Of the native engine.")
@click.option("--batch-invariant", is_flag=True, help="Ask for lanes that tick alone.")
@click.option("--seed", default=1, show_default=True)
@click.option("--peer-venv", metavar="DIR", help="Environment with other routers, for `overhead`.")
@click.option(
    "--beside", "is_beside", is_flag=True, help="In turns: both our engines, llama-server, vLLM."
)
@click.option("--vllm-python", metavar="FILE", help="For --beside: a Python that has vLLM.")
@click.option("--quick", "is_quick", is_flag=True, help="Small sizes, the same bars.")
@click.option("--json", "is_json", is_flag=True, help="JSON lines only, no table.")
def scenario(name: str, key_file: str | None, is_json: bool, **plan: Any) -> None:  # noqa: FBT001 - click passes it by name
    """Play a scenario and judge it; `list` names them all. Exits with 1 when a bar is missed."""
    from superfluid_head.bench.rig import RigError, ended_by_signals
    from superfluid_head.bench.scenarios import scenario_named
    from superfluid_head.bench.scenarios.base import Plan
    from superfluid_head.bench.scenarios.run import listing, run_scenario
    from superfluid_head.config import client_key

    if name == "list":
        click.echo(listing())
        return
    chosen = Plan(api_key=client_key(key_file), **plan)
    if chosen.is_beside and (chosen.base_url or chosen.engine):
        raise click.UsageError("--beside starts its servers: leave --base-url and --engine out")
    if chosen.batch_invariant and chosen.engine in LIBRARIES:
        raise click.UsageError(f"--batch-invariant: {chosen.engine} has no such lanes")
    if chosen.vllm_python and not chosen.is_beside:
        raise click.UsageError("--vllm-python belongs to --beside")
    try:
        kind = scenario_named(name)
    except KeyError:
        raise click.UsageError(f"there is no scenario {name[:40]!r}; see `list`") from None
    try:
        with ended_by_signals():
            is_passed = run_scenario(kind, chosen, click.echo, is_json=is_json)
    except RigError as error:
        click.echo(f"superfluid: {error}", err=True)
        raise SystemExit(START_FAILED) from None
    raise SystemExit(0 if is_passed else 1)


@bench.command("placement")
@click.option("--nodes", default=(50, 200, 1_000), multiple=True, show_default=True)
@click.option("--prompt", default=32_000, show_default=True, help="Tokens of the prompt.")
@click.option("--calls", default=500, show_default=True, help="Of which the median counts.")
def placement(nodes: tuple[int, ...], prompt: int, calls: int) -> None:
    """Measure what choosing a node costs, with the block names of a long prompt, by the size of the fleet."""
    from superfluid_core.clock import SystemClock
    from superfluid_head.bench.placement import run_placement

    raise SystemExit(0 if run_placement(nodes, prompt, calls, SystemClock(), click.echo) else 1)


@bench.command("engine")
@click.option(
    "--model", default="demo", show_default=True, help="A directory, GGUF file or hub id."
)
@click.option(
    "--record-costs", metavar="FILE", help="Only write a table for `simulate`, as measured(FILE)."
)
@click.option("--threads", default=0, show_default="all cores", help="Threads of the engine.")
@click.option("--repeats", default=5, show_default=True, help="Of every step; the median counts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--alone", is_flag=True, help="Leave llama-server out.")
@click.option("--http", is_flag=True, help="Through a head and a node instead, beside others.")
@click.option("--vllm-python", metavar="FILE", help="For --http: a Python that has vLLM.")
def engine(
    model: str,
    record_costs: str | None,
    threads: int,
    repeats: int,
    vllm_python: str | None,
    **flags: bool,
) -> None:
    """Measure steps of the native engine: bare and served, beside the machine's floor, plain torch and llama-server."""
    if flags["http"]:
        from superfluid_head.bench.compare import CompareBench, CompareError
        from superfluid_head.bench.rig import ended_by_signals
        from superfluid_head.bench.served import run_served

        plan = CompareBench(
            model, repeats, 64, 512, threads or os.cpu_count() or 1, vllm_python=vllm_python
        )
        try:
            with ended_by_signals():
                is_met = run_served(plan, click.echo)
        except CompareError as error:
            click.echo(f"superfluid: {error}", err=True)
            raise SystemExit(START_FAILED) from None
        raise SystemExit(0 if is_met else 1)
    module = "bench_steps" if record_costs is None else "bench_engine"
    command = [sys.executable, "-m", f"superfluid_noded.{module}", "--model", model]
    command += ["--threads", str(threads or os.cpu_count() or 1), "--repeats", str(repeats)]
    if record_costs is not None:
        command += ["--record-costs", record_costs]
    else:
        command += [
            flag for flag, name in (("--json", "as_json"), ("--alone", "alone")) if flags[name]
        ]
    # llama-server writes its log to stderr; what went wrong is said on stdout
    done = subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
    raise SystemExit(START_FAILED if done.returncode else 0)


@bench.command("structured")
@click.option("--model", default="demo", show_default=True, help="A GGUF file, or demo.")
@click.option("--rounds", default=3, show_default=True, help="Counted rounds; one more warms up.")
@click.option("--seeds", default=1, show_default=True, help="Answers at temperature 1, of each.")
@click.option("--threads", default=0, show_default="all cores", help="Threads of the engine.")
def structured(model: str, rounds: int, seeds: int, threads: int) -> None:
    """Hold the native engine to 25 JSON schemas, judge its answers, and measure what the masks cost."""
    command = [sys.executable, "-m", "superfluid_noded.bench_structured", "--model", model]
    command += ["--rounds", str(rounds), "--seeds", str(seeds)]
    command += ["--threads", str(threads or os.cpu_count() or 1)]
    raise SystemExit(subprocess.run(command, check=False).returncode)


@bench.command("compare")
@click.option("--model", default="demo", show_default=True, help="A GGUF file, or demo.")
@click.option("--rounds", default=3, show_default=True, help="Counted rounds; one more warms up.")
@click.option("--tokens", default=64, show_default=True, help="Tokens decoded per stream.")
@click.option("--prefill", default=512, show_default=True, help="Tokens of the prefill measure.")
@click.option("--threads", default=0, show_default="all cores", help="Threads of every engine.")
@click.option("--only", multiple=True, metavar="NAME", help="native, llama-server, transformers.")
def compare(
    model: str, only: tuple[str, ...], rounds: int, tokens: int, prefill: int, threads: int
) -> None:
    """Measure our engine beside llama-server and transformers, interleaved, in one run."""
    from superfluid_head.bench.compare import CompareBench, CompareError, run_compare

    try:
        plan = CompareBench(model, rounds, tokens, prefill, threads, only)
        is_whole = run_compare(plan, click.echo)
    except CompareError as error:
        click.echo(f"superfluid: {error}", err=True)
        raise SystemExit(START_FAILED) from None
    raise SystemExit(0 if is_whole else 1)
