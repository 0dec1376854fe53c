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
from pathlib import Path
from typing import Any

import superfluid_core
from superfluid_core.modelfiles.resolve import resolve
from superfluid_head.bench.report import json_line, median, table

Say = Callable[[str], None]
CONTENDERS = ("native", "llama-server", "transformers")
KNOWN = (*CONTENDERS, "vllm")
LOAD_SECONDS = 600.0
VLLM_SETTINGS = (
    "VLLM_CPU_OMP_THREADS_BIND=nobind",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",
    "VLLM_NO_USAGE_STATS=1",
)
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
    vllm_python: str | None = None
    """The interpreter of an environment that has vLLM, which needs versions of its own."""

    def command(self, name: str) -> list[str]:
        """How a contender's process is started."""
        threads = str(self.threads or os.cpu_count() or 1)
        words = ["-m", "superfluid_noded.bench_engine", "--contender", name, "--threads", threads]
        if name != "vllm" or self.vllm_python is None:
            return [sys.executable, *words, "--model", self.model]
        here = Path(superfluid_core.__file__).parent.parent
        settings = (*VLLM_SETTINGS, f"OMP_NUM_THREADS={threads}", f"PYTHONPATH={here}")
        # what the other environment has of models is not known, so it gets the file
        model = str(resolve(self.model).path)
        return ["env", *settings, self.vllm_python, *words, "--model", model]

    def measures(self) -> dict[str, dict[str, int | str]]:
        return {
            "decode 1": {"measure": "decode", "streams": 1, "tokens": self.tokens},
            "decode 8": {"measure": "decode", "streams": 8, "tokens": self.tokens},
            f"prefill {self.prefill}": {"measure": "prefill", "streams": 1, "tokens": self.prefill},
        }


class Contender:
    """A child that measures. Answers are read in a thread, so that every wait has a deadline."""

    def __init__(self, name: str, bench: CompareBench) -> None:
        self.name = name
        self._process = subprocess.Popen(
            bench.command(name),
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
            if line.startswith("{"):  # vLLM writes its log beside the answers
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
        if name not in KNOWN:
            raise CompareError(f"unknown contender {name!r}; known: {', '.join(KNOWN)}")
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


def comparison(figures: Figures, mine: str = "native") -> str:
    """Draw medians, and ours over theirs: above 1 we are faster."""
    rows: list[list[object]] = []
    for label, by_name in figures.items():
        ours = median(by_name.get(mine, []))
        for name, rates in by_name.items():
            ratio = None if name == mine else ours / median(rates)
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
