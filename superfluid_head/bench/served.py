"""`superfluid bench engine --http`: what arrives at a client of a head and a node, beside llama-server's and vLLM's own figures.

Owns the contender that is asked over HTTP, and the bars. The others are those of `superfluid bench compare`: llama-server is
asked over HTTP too, vLLM is stepped in its own process without a server, which favours it. Token ids are random and new in every
round, everything is greedy and runs to its length; turns are taken measure by measure, and medians are compared.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from typing import Any

import httpx

from superfluid_core.clock import SECOND, Clock, SystemClock
from superfluid_core.errors import SuperfluidError
from superfluid_core.modelfiles.resolve import resolve
from superfluid_head.bench.compare import (
    CompareBench,
    CompareError,
    Contender,
    ContenderError,
    Figures,
    comparison,
    contenders,
    one_round,
)
from superfluid_head.bench.exchange import Heard
from superfluid_head.bench.loops import run
from superfluid_head.bench.report import median, table
from superfluid_head.bench.rig import Rig, RigError
from superfluid_head.bench.small_fleet import SmallFleet
from superfluid_head.bench.streams import Events, Streams, post_of

Say = Callable[[str], None]
SERVED = "served"
DECODE_PROMPT_TOKENS = 16
STREAMS_MAX = 8
OTHERS = ("native", "llama-server", "vllm")


@dataclass(frozen=True, slots=True)
class Bar:
    """Ours at least so many times theirs."""

    measure: str
    theirs: str
    least: float


def bars(prefill: int) -> tuple[Bar, ...]:
    """Return what is promised of a served model; `native` is the bare engine, of which serving may cost 15 %."""
    return (
        Bar("decode 8", "llama-server", 1.4),
        Bar("decode 8", "vllm", 1.1),
        Bar("decode 1", "llama-server", 0.9),
        Bar(f"prefill {prefill}", "llama-server", 8.0),
        Bar(f"prefill {prefill}", "vllm", 1.0),
        Bar("decode 1", "native", 1 / 1.15),
        Bar("decode 8", "native", 1 / 1.15),
    )


@dataclass(slots=True)
class Stream:
    """One reply: when its pieces came, and how many tokens the server says that it had."""

    at_ns: list[int]
    tokens: int = 0

    def after(self, moment_ns: int) -> float:
        """Tokens that came after a moment; a piece stands for its share of them."""
        later = sum(at_ns > moment_ns for at_ns in self.at_ns)
        return self.tokens * later / max(1, len(self.at_ns))


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens a second from the moment when all streams had begun to the last piece."""
    began_ns = max(stream.at_ns[0] for stream in streams)
    ended_ns = max(stream.at_ns[-1] for stream in streams)
    return sum(stream.after(began_ns) for stream in streams) * SECOND / max(1, ended_ns - began_ns)


class ServedContender(Contender):
    """A head and a node of ours, as processes on loopback."""

    def __init__(self, bench: CompareBench, clock: Clock) -> None:
        self.name, self._clock = SERVED, clock
        self._rig = Rig()
        flags = ("--engine", "native", "--threads", str(bench.threads), "--model", bench.model)
        try:
            self._vocabulary = resolve(bench.model).config.vocabulary
            self._fleet = SmallFleet(self._rig, flags, bench.model, 1)
        except (RigError, SuperfluidError) as error:
            self._rig.close()
            raise ContenderError(str(error)) from None
        self.about = f"head and node over HTTP, {bench.threads} threads"

    def measure(self, request: dict[str, int | str], number: int) -> float:
        try:
            return run(self._measure(request, number))
        except* (httpx.HTTPError, ContenderError) as errors:
            first = errors.exceptions[0]
            raise ContenderError(f"{type(first).__name__}: {first}") from None

    def close(self) -> None:
        self._rig.close()

    async def _measure(self, request: dict[str, int | str], number: int) -> float:
        streams, tokens = int(request["streams"]), int(request["tokens"])
        is_prefill = request["measure"] == "prefill"
        source = random.Random(number * 1000 + streams)
        low, high = self._vocabulary // 8, self._vocabulary - 8
        length = tokens if is_prefill else DECODE_PROMPT_TOKENS
        prompts = [[source.randrange(low, high) for _ in range(length)] for _ in range(streams)]
        wanted = 1 if is_prefill else tokens
        url = f"{self._fleet.url}/v1/completions"
        requests = [post_of(url, self._body(ids, wanted)) for ids in prompts]
        client = Streams(STREAMS_MAX)
        began_ns = self._clock.now_ns()
        async with aclosing(client), asyncio.TaskGroup() as tasks:
            jobs = [tasks.create_task(client.ask(url, each, self._clock)) for each in requests]
        found = [stream_of(job.result(), wanted) for job in jobs]
        if is_prefill:
            return tokens * SECOND / (found[0].at_ns[0] - began_ns)
        return decode_rate(found)

    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {
            "model": self._fleet.served, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip


def stream_of(heard: Heard, tokens: int) -> Stream:
    """Read what came: `tokens` of them, else it raises ContenderError, or what httpx raises."""
    if heard.failure is not None:
        raise heard.failure
    if heard.status != httpx.codes.OK:
        raise ContenderError(f"{heard.status}: {heard.body[:200]!r}")
    stream, events = Stream([]), Events()
    for at_ns, piece in heard.pieces:
        for event in events.cut(piece):
            if event != b"[DONE]":
                _take(stream, json.loads(event), at_ns)
    if stream.tokens != tokens:
        raise ContenderError(f"a stream of {stream.tokens} tokens, not {tokens}")
    return stream


def _take(stream: Stream, event: dict[str, Any], at_ns: int) -> None:
    if event.get("error"):
        raise ContenderError(str(event["error"]))
    choices = event.get("choices") or ()
    if any(choice.get("text") or choice.get("finish_reason") for choice in choices):
        stream.at_ns.append(at_ns)
    if event.get("usage"):
        stream.tokens = event["usage"]["completion_tokens"]


def judged(figures: Figures, prefill: int) -> tuple[str, bool]:
    """Draw the bars, and say whether every one that could be measured is met."""
    rows: list[list[object]] = []
    is_met = True
    for bar in bars(prefill):
        theirs = figures.get(bar.measure, {}).get(bar.theirs)
        ours = figures.get(bar.measure, {}).get(SERVED)
        if not theirs or not ours:
            rows.append([f"{bar.measure}: served / {bar.theirs}", None, bar.least, "not measured"])
            continue
        ratio = median(ours) / median(theirs)
        is_met = is_met and ratio >= bar.least
        met = "yes" if ratio >= bar.least else "no"
        rows.append([f"{bar.measure}: served / {bar.theirs}", ratio, bar.least, met])
    return table(["ratio of medians", "found", "at least", "met"], rows), is_met


def run_served(bench: CompareBench, say: Say) -> bool:
    """Measure all rounds. True when every bar that could be measured is met. Raises CompareError."""
    names = tuple(name for name in OTHERS if name != "vllm" or bench.vllm_python)
    bench = replace(bench, only=names)
    figures: Figures = {}
    try:
        served = ServedContender(bench, SystemClock())
    except ContenderError as error:
        raise CompareError(f"{SERVED}: {error}") from None
    say(f"{SERVED}: {served.about}")
    with closing(served), contenders(bench, say) as loaded:
        loaded.insert(0, served)
        for number in range(bench.rounds + 1):
            one_round(bench, loaded, number, figures, say)
        if served not in loaded:
            raise CompareError(f"{SERVED}: did not last")
    found, is_met = judged(figures, bench.prefill)
    say(f"\n{comparison(figures, SERVED)}\n\n{found}")
    return is_met
