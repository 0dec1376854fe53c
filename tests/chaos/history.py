"""What happened, written down while it happens, and judged afterwards: the history of a chaos run and its off-line checker.

The recorder keeps every request with the transcript that its client saw, every event that the head told (who was
placed where, who moved, which node was lost) with the time of its arrival here, and every fault. The checker knows
nothing of the run: it reads the history, asks the oracle for each answer, and says what is wrong with it:

    a complete answer      is the oracle's text, whole; usage is the oracle's; the ends are finish, usage, done, once each
    a broken answer        is a prefix of the oracle's text and has no [DONE]
    an error in a stream   is the last thing in it

A gap is the longest time between two pieces of text of one answer; those count that moved or stood still. The piece that ends it
may have come while the measuring process itself did not run, as a ticker in it proves: only that stretch, directly before the
piece was seen, is taken off. What it slept through in the middle of a gap is no excuse. The gaps as clients saw them are kept too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from superfluid_head.bench.load import Answer
from superfluid_head.bench.report import percentile
from tests.chaos.oracle import Expected

COMPLETE = ["finish", "usage", "done"]
STANDSTILL_MS = 500.0
PROBLEMS_SHOWN = 6
TICK_MS = 10.0
"""How often the ticker looks."""

Law = Callable[[dict[str, Any]], Expected]


@dataclass(slots=True)
class Entry:
    """One request: what was asked, what came, and what was expected of it (`may_fail` when its own fate was to fail)."""

    body: dict[str, Any]
    answer: Answer
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the head told of itself."""

    at_ms: float
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to the fleet."""

    at_ms: float
    kind: str
    node: str = ""


@dataclass(slots=True)
class History:
    """One run. Appended to by clients, the listener of events, and whoever breaks things."""

    entries: list[Entry] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    late_ms: list[tuple[float, float]] = field(default_factory=list)

    def unseen_ms(self, since_ms: float, until_ms: float) -> float:
        """How long before `until_ms` what was seen then may have come: the measuring process did not run all that while."""
        stretches = (
            until_ms - max(since_ms, at_ms - late_ms)
            for at_ms, late_ms in self.late_ms
            if at_ms - late_ms <= until_ms <= at_ms + TICK_MS
        )
        return max(stretches, default=0.0)

    def moved(self) -> set[str]:
        """Ids of the requests that moved at least once."""
        return {e.fields["request"] for e in self.events if e.kind == "moved"}

    def told_between(self, request: str, since_ms: float, until_ms: float) -> str:
        """What the head told of a request, its nodes and its links between two moments, in seconds after the first."""
        told = (
            f"{(e.at_ms - since_ms) / 1000:+.2f} {e.kind} {_words(e.fields)}"
            for e in self.events
            if since_ms - 100 <= e.at_ms <= until_ms and e.fields.get("request") in (None, request)
        )
        return "; ".join(told)

    def lost_at_ms(self, node: str, since_ms: float) -> float | None:
        """When the head first said, after `since_ms`, that it lost `node`."""
        found = (
            e.at_ms
            for e in self.events
            if e.kind == "node-down" and e.fields.get("node") == node and e.at_ms >= since_ms
        )
        return next(found, None)


@dataclass(slots=True)
class Judgement:
    """What the checker found."""

    streams: int = 0
    complete: int = 0
    equal: int = 0
    moved: int = 0
    failed: int = 0
    lost: int = 0
    duplicated: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    raw_gaps_ms: list[float] = field(default_factory=list)
    longest: tuple[float, str] = (0.0, "")
    problems: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def equal_percent(self) -> float:
        return 100.0 * self.equal / self.complete if self.complete else 100.0

    def gap_ms(self, percent: float) -> float:
        return percentile(self.gaps_ms, percent)


def longest_gap(answer: Answer) -> tuple[float, float, float]:
    """(length, begin, end) in milliseconds; between pieces, and from the last one to the end."""
    times = [*answer.at_ms, answer.ended_ms] if answer.at_ms else []
    return max(((b - a, a, b) for a, b in pairwise(times)), default=(0.0,) * 3)


def longest_gap_ms(answer: Answer, history: History | None = None) -> float:
    """The longest gap without what the measuring process slept through at its end."""
    gap_ms, since_ms, until_ms = longest_gap(answer)
    return gap_ms - (history.unseen_ms(since_ms, until_ms) if history else 0.0)


def text_faults(text: str, expected: str, *, is_whole: bool) -> tuple[int, int, str]:
    """(lost, duplicated, words): whether `text` is `expected`, or a prefix of it when it is not whole."""
    if text == expected or (not is_whole and expected.startswith(text)):
        return 0, 0, ""
    pairs = enumerate(zip(text, expected, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(text), len(expected)))
    rest, tail = text[at:], expected[at:]
    is_again = bool(rest) and (rest[:16] in expected[:at] or len(text) > len(expected))
    words = f"differs from the oracle at character {at} of {len(expected)}: {rest[:20]!r} for {tail[:20]!r}"
    return int(not is_again), int(is_again), words


def ends_fault(answer: Answer) -> str:
    """What is wrong with the order of terminal events, or nothing."""
    ends = answer.endings
    if "late" in ends:
        return "text behind an end"
    if ends.count("done") > 1 or ends.count("finish") > 1 or ends.count("error") > 1:
        return f"more than one terminal event: {ends}"
    if "error" in ends and ends[-1] != "error":
        return f"something behind an error: {ends}"
    if "done" in ends and ends != COMPLETE:
        return f"[DONE] without finish and usage: {ends}"
    return ""


def judge_entry(entry: Entry, expected: Expected, found: Judgement) -> None:
    """Add what one transcript shows to `found`."""
    answer = entry.answer
    found.streams += 1
    words = [ends_fault(answer)]
    lost, again, difference = text_faults(answer.text, expected.text, is_whole=answer.is_complete)
    found.lost += lost
    found.duplicated += again
    words.append(difference)
    if answer.is_complete:
        found.complete += 1
        found.equal += not difference
        usage = (answer.prompt_tokens, answer.completion_tokens)
        if usage != (expected.prompt_tokens, expected.completion_tokens):
            words.append(
                f"usage {usage} is not {expected.prompt_tokens, expected.completion_tokens}"
            )
    else:
        found.errors[(answer.error or "no finish")[:120]] += 1
        if not entry.may_fail:
            found.failed += 1
            words.append(f"failed: {answer.error}")
    found.problems += [f"{answer.request_id}: {one}" for one in words if one]


def judge(history: History, law: Law, standstill_ms: float = STANDSTILL_MS) -> Judgement:
    """Judge all transcripts."""
    found = Judgement()
    moved = history.moved()
    for entry in history.entries:
        judge_entry(entry, law(entry.body), found)
        gap_ms = longest_gap_ms(entry.answer, history)
        has_moved = entry.answer.request_id in moved
        found.moved += has_moved
        if entry.answer.is_complete and (has_moved or gap_ms >= standstill_ms):
            raw_ms, since_ms, until_ms = longest_gap(entry.answer)
            found.gaps_ms.append(gap_ms)
            found.raw_gaps_ms.append(raw_ms)
            if gap_ms > found.longest[0]:
                told = history.told_between(entry.answer.request_id or "", since_ms, until_ms)
                found.longest = (gap_ms, f"{entry.answer.request_id}: {told}")
    return found


def _words(fields: dict[str, Any]) -> str:
    return " ".join(str(fields[name]) for name in ("node", "reason", "epoch") if name in fields)


def shown(problems: Iterable[str]) -> list[str]:
    every = list(problems)
    more = [f"... and {len(every) - PROBLEMS_SHOWN} more"] if len(every) > PROBLEMS_SHOWN else []
    return every[:PROBLEMS_SHOWN] + more
