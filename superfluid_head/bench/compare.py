"""`superfluid bench compare`: our engine, llama-server and transformers on the same weights, interleaved in one run.

Each contender is a child process (`python -m superfluid_noded.bench_engine`) that loads the model once and then answers one
JSON request a line; this side only gives turns, so that exactly one contender computes at any time, and every round visits
all of them. It imports no engine. Medians of the counted rounds are shown with the ratio to our own engine; a contender that
cannot run is said and left out, never guessed.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from superfluid_head.bench.report import json_line, median, table

Say = Callable[[str], None]
CONTENDERS = ("native", "llama-server", "transformers")
LOAD_SECONDS = 300.0
ROUND_SECONDS = 300.0


class CompareError(Exception):
    """Raised when our own engine cannot be measured, or when a name is unknown."""


class ContenderError(Exception):
    """Raised when one contender cannot run; the others go on."""


@dataclass(frozen=True, slots=True)
class CompareBench:
    """What is measured: `tokens` decoded per stream at 1 and 8 streams, and the prefill of `prefill` tokens."""

    model: str
    rounds: int
    tokens: int
    prefill: int
    threads: int
    only: tuple[str, ...] = ()

    def measures(self) -> dict[str, dict[str, int | str]]:
        return {
            "decode 1": {"measure": "decode", "streams": 1, "tokens": self.tokens},
            "decode 8": {"measure": "decode", "streams": 8, "tokens": self.tokens},
            f"prefill {self.prefill}": {"measure": "prefill", "streams": 1, "tokens": self.prefill},
        }


class Contender:
    """A child that measures. Answers are read in a thread, so that every wait has a deadline."""

    def __init__(self, name: str, bench: CompareBench) -> None:
        threads = bench.threads or os.cpu_count() or 1
        self.name = name
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "superfluid_noded.bench_engine",
                "--contender", name, "--model", bench.model, "--threads", str(threads),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue(maxsize=16)
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()
        try:
            self.about = self._answer(LOAD_SECONDS)["about"]
        except ContenderError:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise ContenderError(f"no answer in {seconds:.0f} s") from None
        if not line:
            raise ContenderError(f"ended with exit {self._process.wait(timeout=10)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderError(str(answer["error"]))
        return answer

    def measure(self, request: dict[str, int | str], number: int) -> float:
        """Return tokens per second of one measure in round `number`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request | {"round": number}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ContenderError(f"ended: {error}") from None
        return float(self._answer(ROUND_SECONDS)["tok_s"])

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)


def start(bench: CompareBench, say: Say) -> Iterator[Contender]:
    """Yield what could be loaded, one after the other, so that loading disturbs nobody."""
    names = bench.only or CONTENDERS
    for name in names:
        if name not in CONTENDERS:
            raise CompareError(f"unknown contender {name!r}; known: {', '.join(CONTENDERS)}")
    for name in names:
        try:
            contender = Contender(name, bench)
        except ContenderError as error:
            say(f"{name}: left out: {error}")
            continue
        say(f"{name}: {contender.about}")
        yield contender


@contextmanager
def contenders(bench: CompareBench, say: Say) -> Iterator[list[Contender]]:
    loaded: list[Contender] = []
    try:
        loaded.extend(start(bench, say))
        yield loaded
    finally:
        for contender in loaded:
            contender.close()


Figures = dict[str, dict[str, list[float]]]


def one_round(
    bench: CompareBench, loaded: list[Contender], number: int, figures: Figures, say: Say
) -> None:
    """Visit every contender for every measure; a contender that breaks leaves `loaded`."""
    for label, request in bench.measures().items():
        for contender in list(loaded):
            try:
                rate = contender.measure(request, number)
            except ContenderError as error:
                say(f"{contender.name}: left out from round {number} on: {error}")
                loaded.remove(contender)
                contender.close()
                continue
            fields = {"bench": "compare", "round": number, "warm_up": number == 0}
            say(json_line(fields | {"engine": contender.name, "measure": label, "tok_s": rate}))
            if number > 0:
                figures.setdefault(label, {}).setdefault(contender.name, []).append(rate)


def comparison(figures: Figures) -> str:
    """Draw medians, and ours over theirs: above 1 we are faster."""
    rows: list[list[object]] = []
    for label, by_name in figures.items():
        ours = median(by_name.get("native", []))
        for name, rates in by_name.items():
            ratio = None if name == "native" else ours / median(rates)
            rows.append([f"{label}: {name}", median(rates), min(rates), max(rates), ratio])
    return table(["tok/s", "median", "min", "max", "ours/theirs"], rows)


def run_compare(bench: CompareBench, say: Say) -> bool:
    """Measure all rounds. True when every contender was there to the end. Raises CompareError."""
    asked = len(bench.only or CONTENDERS)
    figures: Figures = {}
    with contenders(bench, say) as loaded:
        if not loaded:
            raise CompareError("no contender could be loaded")
        for number in range(bench.rounds + 1):
            one_round(bench, loaded, number, figures, say)
        is_whole = len(loaded) == asked
    say("\n" + comparison(figures))
    return is_whole
