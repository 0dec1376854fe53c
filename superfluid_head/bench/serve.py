"""`superfluid bench serve`: a closed loop of streaming chats against a server that is already running.

One JSON line per round, then a table of medians; the first round warms up and is not counted. Completion tokens come
from the server's own usage; refused and broken requests are failures and are said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from superfluid_core.clock import Clock
from superfluid_core.progress import Meter
from superfluid_head.bench.load import Answer, chat_body, closed_loop, http_client
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import prose
from superfluid_head.bench.report import json_line, median, percentile, table

Say = Callable[[str], None]
COLUMNS = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "tok_s", "failed")


@dataclass(frozen=True, slots=True)
class ServeBench:
    """What to send where. `words` is the length of each prompt, which no two requests share."""

    url: str
    model: str
    concurrency: tuple[int, ...]
    requests: int
    max_tokens: int
    words: int
    rounds: int
    seed: int
    api_key: str | None = None


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """TTFT and inter-token percentiles, tokens per wall second, failures."""
    good = [answer for answer in answers if answer.is_complete]
    firsts = [answer.first_ms for answer in good if answer.first_ms is not None]
    gaps = [gap for answer in good for gap in answer.gaps_ms()]
    wall_ms = max(a.ended_ms for a in answers) - min(a.started_ms for a in answers)
    return {
        "ttft_ms_p50": percentile(firsts, 50),
        "ttft_ms_p99": percentile(firsts, 99),
        "itl_ms_p50": percentile(gaps, 50),
        "itl_ms_p99": percentile(gaps, 99),
        "tok_s": 1000 * sum(answer.completion_tokens for answer in good) / max(wall_ms, 1e-6),
        "failed": len(answers) - len(good),
    }


async def _round(bench: ServeBench, concurrency: int, number: int, clock: Clock) -> list[Answer]:
    first = bench.seed + 1_000_003 * number + 1_009 * concurrency
    bodies = [
        chat_body(bench.model, prose(first + n, bench.words), bench.max_tokens)
        for n in range(bench.requests)
    ]
    async with http_client(concurrency + 8, bench.api_key) as client:
        return await closed_loop(client, bench.url, bodies, concurrency, clock)


def run_serve(bench: ServeBench, clock: Clock, say: Say) -> bool:
    """Run all rounds, interleaved over the concurrencies. True when nothing failed."""
    measured: dict[int, list[dict[str, float]]] = {n: [] for n in bench.concurrency}
    errors: list[str] = []
    turns = [(n, c) for n in range(bench.rounds + 1) for c in bench.concurrency]
    with Meter("rounds", len(turns), has_lines=False) as meter:
        for number, concurrency in turns:
            answers = run(_round(bench, concurrency, number, clock))
            meter.step()
            found = figures(answers)
            errors += [answer.error for answer in answers if answer.error]
            say(
                json_line(
                    {"bench": "serve", "round": number, "warm_up": number == 0}
                    | {"concurrency": concurrency, "requests": bench.requests, **found}
                )
            )
            if number > 0:
                measured[concurrency].append(found)
    rows = [
        [concurrency, *(median([r[name] for r in rounds]) for name in COLUMNS)]
        for concurrency, rounds in measured.items()
    ]
    say("\n" + table(["streams", *COLUMNS], rows))
    if errors:
        say(f"\n{len(errors)} request(s) failed; the first: {errors[0]}")
    return not errors
