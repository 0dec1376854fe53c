"""`superfluid bench engine`: what steps of the native engine take, bare and served, beside their floor and beside others.

All contenders live in this one process and take turns, measure by measure and round by round, so that a busy moment of the machine
falls on all of them; medians count. `native` is the engine as a node runs it, `parts` the same over dequantized weights: compiled
parts between torch's products, which is the nearest that `torch-ops`, without compiled ops and quantized steps, can be held against.
`llama-server` is the one of the xllamacpp wheel where that is installed.

    floor   the larger of two times: reading the step's weights at the measured bandwidth, its multiplications at the measured rate
    bare    the forward pass alone    served   a whole step: plan, forward, sampling, the scheduler's account
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import click

from superfluid_core.clock import SECOND
from superfluid_core.engine.base import Engine
from superfluid_core.errors import SuperfluidError
from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_noded.bench_engine import (
    CLOCK,
    DECODE_PROMPT_TOKENS,
    STREAMS_MAX,
    Contender,
    LlamaServerContender,
    NativeContender,
    Request,
    random_prompts,
    rate,
)
from superfluid_noded.bench_gaps import DECODERS, PROMPT_TOKENS, ROWS_SPARE, gap_lines, measure_gaps
from superfluid_noded.config import cache_dir, settle_threads

LANES = (1, 8, 16)
PROMPTS = (128, 512)
TOKENS = 48
# name, whether anything is compiled and kept, weights
NATIVES = (("native", True, "auto"), ("parts", True, "dequantized"), ("torch-ops", False, "auto"))
PROBE_BYTES = 256 << 20
PROBE_ROUNDS = 5
PROBE_SIDE = 2048
GAP_ROUNDS = 3
GAP_OUTPUTS = 2048

Say = Callable[[str], None]


@dataclass(slots=True)
class Figures:
    """Everything measured, by measure and contender: milliseconds of a step, or tokens a second."""

    bare_ms: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    tok_s: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, table: dict[str, dict[str, list[float]]], label: str, name: str, value: float) -> None:  # fmt: skip
        table.setdefault(label, {}).setdefault(name, []).append(value)


def best_of(action: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs: a machine's best is what a floor is made of."""
    times = []
    for _ in range(PROBE_ROUNDS):
        began_ns = CLOCK.now_ns()
        action()
        times.append((CLOCK.now_ns() - began_ns) / SECOND)
    return min(times)


def machine_rates() -> tuple[float, float]:
    """(bytes read a second, bf16 floating point operations a second), with the engine's threads."""
    import torch

    block = torch.ones(PROBE_BYTES // 8, dtype=torch.int64)
    square = torch.ones(PROBE_SIDE, PROBE_SIDE, dtype=torch.bfloat16)
    bytes_per_s = PROBE_BYTES / best_of(block.sum)
    return bytes_per_s, 2 * PROBE_SIDE**3 / best_of(lambda: square @ square)


def weight_sizes(files: ModelFiles) -> tuple[int, int]:
    """(bytes of all matrices in bf16, multiplications of one token)."""
    c = files.config
    width = c.head_dim * (c.heads + 2 * c.kv_heads)
    layer = c.hidden * (width + c.head_dim * c.heads + 3 * c.intermediate)
    count = c.layers * layer + c.vocabulary * c.hidden
    return 2 * count, count


def floors(native: NativeContender, files: ModelFiles, rates: tuple[float, float]) -> dict[str, float]:  # fmt: skip
    """Milliseconds below which no step can be, by measure."""
    plain_bytes, count = weight_sizes(files)
    found = {}
    steps = [(f"decode {lanes}", lanes, lanes) for lanes in LANES]
    steps += [(f"prefill {tokens}", tokens, 1) for tokens in PROMPTS]
    for label, rows, sampled in steps:
        read = native.engine.bytes_read(rows) or plain_bytes
        head = files.config.vocabulary * files.config.hidden
        flops = 2 * ((count - head) * rows + head * sampled)
        found[label] = 1e3 * max(read / rates[0], flops / rates[1])
    return found


class Bare:
    """Forward passes of one engine over contexts of the usual length, nothing sampled."""

    def __init__(self, native: NativeContender) -> None:
        from superfluid_core.engine.torch.drive import Driver

        self._native = native
        self._driver = Driver(native.engine)
        self._vocabulary = native.engine.describe().vocabulary

    def decode_ms(self, lanes: int) -> float:
        driver = self._driver
        prompts = random_prompts(self._vocabulary, lanes, DECODE_PROMPT_TOKENS, lanes)
        sessions = [driver.open(prompt, TOKENS) for prompt in prompts]
        driver.tick(1)
        found = self._time(driver.plan(1))
        for session in sessions:
            driver.close(session)
        driver.tick(0)
        return found

    def prefill_ms(self, tokens: int) -> float:
        driver = self._driver
        session = driver.open(random_prompts(self._vocabulary, 1, tokens, tokens)[0], 1)
        found = self._time(driver.plan(1))
        driver.close(session)
        driver.tick(0)
        return found

    def _time(self, plan: Any) -> float:
        engine = self._native.engine
        engine.forward_only(plan)
        began_ns = CLOCK.now_ns()
        engine.forward_only(plan)
        return (CLOCK.now_ns() - began_ns) / 1e6


def one_round(
    number: int, natives: dict[str, NativeContender], others: dict[str, Contender], found: Figures
) -> None:
    """Let everybody take every measure once."""
    vocabulary = next(iter(natives.values())).engine.describe().vocabulary
    contenders: dict[str, Contender] = {**natives, **others}
    for lanes in LANES:
        for name, contender in contenders.items():
            if name in others and lanes > STREAMS_MAX:
                continue
            served = rate(contender, vocabulary, Request("decode", lanes, TOKENS, number))
            found.add(found.tok_s, f"decode {lanes}", name, served)
        for name, native in natives.items():
            found.add(found.bare_ms, f"decode {lanes}", name, Bare(native).decode_ms(lanes))
    for tokens in PROMPTS:
        for name, contender in contenders.items():
            served = rate(contender, vocabulary, Request("prefill", 1, tokens, number))
            found.add(found.tok_s, f"prefill {tokens}", name, served)
        for name, native in natives.items():
            found.add(found.bare_ms, f"prefill {tokens}", name, Bare(native).prefill_ms(tokens))


def summary(found: Figures, floor_ms: dict[str, float]) -> list[dict[str, Any]]:
    """One row a measure and contender, with the ratios that the bars are about."""
    rows = []
    for label, by_name in found.tok_s.items():
        tokens = int(label.split()[1])
        ours = median(by_name["native"])
        for name, rates in by_name.items():
            served = median(rates)
            row = {"measure": label, "name": name, "tok_s": served, "native_ratio": ours / served}
            if name == "torch-ops" and "parts" in by_name:
                row["over_parts"] = served / median(by_name["parts"])
            bare = found.bare_ms.get(label, {}).get(name)
            if bare is not None:
                bare_ms = median(bare)
                row |= {
                    "bare_ms": bare_ms,
                    "served_over_bare": 1e3 * tokens / served / bare_ms,
                    "floor_ms": floor_ms[label],
                    "over_floor": bare_ms / floor_ms[label],
                }
            rows.append(row)
    return rows


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Draw the summary for people."""
    out = [f"{'':28}{'tok/s':>8}{'ours/it':>9}{'bare ms':>9}{'served/bare':>13}{'floor ms':>10}{'x floor':>9}{'it/parts':>10}"]  # fmt: skip
    for row in rows:
        cells = [f"{row['measure']}: {row['name']}".ljust(28)]
        widths = {"tok_s": 8, "native_ratio": 9, "bare_ms": 9, "served_over_bare": 13, "floor_ms": 10, "over_floor": 9, "over_parts": 10}  # fmt: skip
        for key, width in widths.items():
            value = row.get(key)
            shown = "-" if value is None else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
            cells.append(shown.rjust(width))
        out.append("".join(cells))
    return out


def measure(files: ModelFiles, threads: int, repeats: int, *, alone: bool, say: Say) -> dict[str, Any]:  # fmt: skip
    """Load everybody, measure the machine, take rounds; the first one warms up and does not count."""
    settle_threads()
    loaded_s = {}
    natives = {}
    for name, cache, weights in NATIVES:
        began_ns = CLOCK.now_ns()
        own = cache_dir(None) if cache else None
        natives[name] = NativeContender(files, threads, "cpu", own, max(LANES), weights)
        loaded_s[name] = (CLOCK.now_ns() - began_ns) / SECOND
        say(f"{name}: {natives[name].about}, loaded in {loaded_s[name]:.1f} s")
    others: dict[str, Contender] = {}
    try:
        if not alone:
            others["llama-server"] = LlamaServerContender(files, threads)
    except (ImportError, RuntimeError) as error:
        say(f"llama-server: left out: {error}")
    rates = machine_rates()
    floor_ms = floors(natives["native"], files, rates)
    found = Figures()
    for number in range(repeats + 1):
        counted = found if number else Figures()
        one_round(number, natives, others, counted)
        say(f"round {number} of {repeats}")
    del natives, others
    say("pauses beside a long prompt")
    gaps = measure_gaps(gap_engine(files, threads), min(GAP_ROUNDS, repeats), CLOCK)
    return {
        "threads": threads,
        "gaps": gaps,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "bytes_per_s": rates[0],
        "flops": rates[1],
        "loaded_s": loaded_s,
        "rows": summary(found, floor_ms),
    }


def gap_engine(files: ModelFiles, threads: int) -> Engine:
    """Make an engine whose steps have room for a whole long prompt."""
    from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine

    rows = PROMPT_TOKENS + ROWS_SPARE
    window = min(files.config.window, rows + GAP_OUTPUTS)
    options = TorchOptions(
        device="cpu",
        lanes=DECODERS + 1,
        window=window,
        threads=threads,
        step_tokens=rows,
        cache_dir=cache_dir(None),
    )
    return build_torch_engine(files, options)


@click.command(help="Steps of the native engine, bare and served, beside their floor and others.")
@click.option("--model", default="demo", show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Counted rounds.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--alone", is_flag=True, help="Leave llama-server out.")
def main(model: str, threads: int, repeats: int, as_json: bool, alone: bool) -> None:  # noqa: FBT001 - click's
    def say(text: str) -> None:
        if not as_json:
            click.echo(text)

    try:
        found = measure(resolve(model), threads, max(1, repeats), alone=alone, say=say)
    except (ImportError, OSError, RuntimeError, ValueError, SuperfluidError) as error:
        click.echo(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise SystemExit(1) from None
    if as_json:
        click.echo(json.dumps(found))
        return
    load = found["load_average"]
    click.echo(
        f"read {found['bytes_per_s'] / 1e9:.1f} GB/s, multiply {found['flops'] / 1e12:.2f} TFLOP/s,"
        f" load average {'unknown' if load is None else f'{load:.1f}'}"
    )
    for line in (*lines(found["rows"]), *gap_lines(found["gaps"])):
        click.echo(line)


if __name__ == "__main__":
    main()
