"""`superfluid bench structured`: the native engine under constraints, what its answers are worth and what they cost.

    {"schema": "city", "mode": "greedy", "finish": "stop", "tokens": 31, "fault": null}       one line an answer
    {"lanes": 8, "free_tok_s": 301.2, "held_tok_s": 295.0, "slowdown_pct": 2.1}               one line a number of lanes

An answer is judged by decisions 38: one that stopped must parse and satisfy its schema (judged by bench_schemas.py, not by the compiler),
one that ran to its budget must be the beginning of something that does. Speed is decode under a constraint that
never ends against the same lanes without one, rounds taken in turn, CPU seconds beside the clock's.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from superfluid_core.clock import SECOND, SystemClock
from superfluid_core.errors import SuperfluidError
from superfluid_core.grammar.compiler import Grammars, vocabulary_of
from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_core.session import Grammar, GrammarKind, SamplingParams, SessionKey, SessionSpec
from superfluid_noded.bench_schemas import SCHEMAS, judge
from superfluid_noded.config import settle_threads

LANES = 8
WINDOW = 1_024
BUDGET = 256
SPEED_TOKENS = 96
GREEDY = SamplingParams(temperature=0.0)
ENDLESS = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one schema in one mode; `fault` None is a good answer."""

    schema: str
    mode: str
    finish: str
    tokens: int
    fault: str | None

    def line(self) -> str:
        return json.dumps(
            {
                "schema": self.schema,
                "mode": self.mode,
                "finish": self.finish,
                "tokens": self.tokens,
                "fault": self.fault,
            }
        )


class StructuredBench:
    """One engine with its grammars."""

    def __init__(self, files: ModelFiles, threads: int) -> None:
        settle_threads()
        from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
        from superfluid_core.engine.torch.drive import Driver

        self.tokenizer = files.tokenizer()
        size = max(files.config.vocabulary, self.tokenizer.vocabulary)
        self.grammars = Grammars(lambda: vocabulary_of(self.tokenizer, size))
        options = TorchOptions(lanes=LANES, window=WINDOW, threads=threads)
        engine = build_torch_engine(files, options, grammars=self.grammars)
        self.about = engine.describe().engine_build
        self._driver = Driver(engine)
        self._template = files.template()
        self._opened = 0

    def answers(self, schemas: Sequence[tuple[str, str, Any]], seeds: int) -> list[Answer]:
        """Ask every schema greedily and at temperature 1 with every seed, a lane each."""
        modes = [GREEDY, *(SamplingParams(temperature=1.0, seed=seed) for seed in range(seeds))]
        jobs = [(*each, mode) for mode in modes for each in schemas]
        found: list[Answer] = []
        for first in range(0, len(jobs), LANES):
            found += self._together(jobs[first : first + LANES])
        return found

    def _together(self, jobs: Sequence[tuple[str, str, Any, SamplingParams]]) -> list[Answer]:
        sessions = []
        for _, words, schema, sampling in jobs:
            grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
            prompt = self._prompt(f"{words} Answer in JSON.")
            spec = self._spec(prompt, BUDGET, grammar, sampling)
            sessions.append(self._driver.open_spec(spec))
        self._driver.finish()
        found = []
        for (name, _, schema, sampling), session in zip(jobs, sessions, strict=True):
            self._driver.close(session)
            mode = "greedy" if sampling is GREEDY else f"seed {sampling.seed}"
            if session.fault is not None:
                found.append(Answer(name, mode, "error", len(session.outputs), session.fault.text))
            else:
                found.append(self._judged(name, mode, schema, session.outputs))
        return found

    def _judged(self, name: str, mode: str, schema: Any, outputs: list[int]) -> Answer:
        ends = set(self.tokenizer.eos_ids)
        if outputs[-1] in ends:
            data = b"".join(self.tokenizer.token_bytes(token) for token in outputs[:-1])
            try:
                fault = judge(json.loads(data), schema)
            except ValueError as error:
                fault = f"no JSON: {error}"
            return Answer(name, mode, "stop", len(outputs), fault)
        matcher = self.grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        is_prefix = matcher.try_consume_tokens(outputs) == len(outputs)
        fault = None if is_prefix else "no beginning of a valid answer"
        return Answer(name, mode, "length", len(outputs), fault)

    def _prompt(self, words: str) -> tuple[int, ...]:
        if self._template is None:
            return tuple(self.tokenizer.encode(words, allow_special=False, add_bos=True))
        messages = [{"role": "user", "content": words}]
        return tuple(self._template.render(messages).encode(self.tokenizer))

    def _spec(
        self, prompt: tuple[int, ...], most: int, grammar: Grammar | None, sampling: SamplingParams
    ) -> SessionSpec:
        self._opened += 1
        return SessionSpec(
            key=SessionKey("bench", self._opened),
            model="bench",
            prompt=prompt,
            max_output=most,
            stop_ids=frozenset(self.tokenizer.eos_ids),
            sampling=sampling,
            grammar=grammar,
        )

    # --- what it costs

    def speed(self, lanes: int, rounds: int, clock: SystemClock) -> dict[str, float]:
        """Decode with and without a constraint, in turn; medians of tokens a second and CPU ms a token."""
        free: list[tuple[float, float]] = []
        held: list[tuple[float, float]] = []
        for number in range(rounds + 1):
            for kept, grammar in ((free, None), (held, ENDLESS)):
                measured = self._decode(lanes, grammar, clock)
                if number:
                    kept.append(measured)
        free_rate, held_rate = (
            statistics.median(rate for rate, _ in each) for each in (free, held)
        )
        free_cpu, held_cpu = (statistics.median(cpu for _, cpu in each) for each in (free, held))
        return {
            "lanes": lanes,
            "free_tok_s": round(free_rate, 1),
            "held_tok_s": round(held_rate, 1),
            "slowdown_pct": round(100 * (1 - held_rate / free_rate), 1),
            "free_cpu_ms": round(free_cpu, 3),
            "held_cpu_ms": round(held_cpu, 3),
        }

    def _decode(
        self, lanes: int, grammar: Grammar | None, clock: SystemClock
    ) -> tuple[float, float]:
        prompt = self._prompt("Count.")
        sampling = GREEDY
        specs = [self._spec(prompt, SPEED_TOKENS, grammar, sampling) for _ in range(lanes)]
        if grammar is None:
            specs = [replace(spec, stop_ids=frozenset()) for spec in specs]
        sessions = [self._driver.open_spec(spec) for spec in specs]
        self._driver.tick(1)
        before_ns, before_cpu = clock.now_ns(), time.process_time()
        start = sum(len(session.outputs) for session in sessions)
        self._driver.finish(32)
        tokens = sum(len(session.outputs) for session in sessions) - start
        elapsed_s = (clock.now_ns() - before_ns) / SECOND
        cpu_ms = (time.process_time() - before_cpu) * 1_000 / max(1, tokens)
        for session in sessions:
            self._driver.close(session)
        return tokens / elapsed_s, cpu_ms


def summary(answers: Sequence[Answer], speeds: Sequence[dict[str, float]]) -> str:
    """Write the table."""
    stops = [answer for answer in answers if answer.finish == "stop"]
    lengths = [answer for answer in answers if answer.finish == "length"]
    lines = [
        f"answers {len(answers)}, stop {len(stops)}, length {len(lengths)} ({100 * len(lengths) / max(1, len(answers)):.1f} %)",
        f"faults {sum(answer.fault is not None for answer in answers)}",
        "lanes  free tok/s  held tok/s  slowdown  CPU ms a token",
    ]
    lines += [
        f"{each['lanes']:5.0f}  {each['free_tok_s']:10.1f}  {each['held_tok_s']:10.1f}  {each['slowdown_pct']:6.1f} %  "
        f"{each['free_cpu_ms']:.2f} / {each['held_cpu_ms']:.2f}"
        for each in speeds
    ]
    return "\n".join(lines)


@click.command()
@click.option("--model", default="demo", show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--schemas", default=len(SCHEMAS), show_default=True, help="How many of them.")
@click.option("--seeds", default=1, show_default=True, help="Answers at temperature 1, of each.")
def main(model: str, threads: int, rounds: int, schemas: int, seeds: int) -> None:
    """Run the bench; exit 1 when an answer is wrong or more than 5 % run to their budget."""
    try:
        bench = StructuredBench(resolve(model, offline=False, token=None), threads)
    except SuperfluidError as error:
        click.echo(f"superfluid: {error.message}", err=True)
        sys.exit(3)
    answers = bench.answers(SCHEMAS[:schemas], seeds)
    for answer in answers:
        click.echo(answer.line())
    speeds = [bench.speed(lanes, rounds, SystemClock()) for lanes in (1, LANES)]
    for speed in speeds:
        click.echo(json.dumps(speed))
    click.echo(f"\n{bench.about}\n{summary(answers, speeds)}")
    lengths = sum(answer.finish == "length" for answer in answers)
    is_good = all(answer.fault is None for answer in answers) and lengths * 20 <= len(answers)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
