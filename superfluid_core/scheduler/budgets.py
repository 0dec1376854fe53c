"""How long a tick is and how much of it is prompt: numbers in, numbers out (scheduler.md, Tick length, Budgets).

It must not know sessions. Everything is derived from measured rates; while a rate is unknown a tick is one decode step
and the configured prefill budget, and the measurement is there after it.
"""

from __future__ import annotations

from typing import NamedTuple

from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.rates import Rates

_MS = 1_000_000
OPEN_NS = 250 * _MS
_FREE_CUT_MS = 50
_FREE_CUT_BUSY_MS = 250
_PREFILL_OPEN_NS = 500 * _MS
_PREFILL_BUSY_NS = 8_000 * _MS
_CHUNK = 512
_SMALL_CHUNK = 128
_PREFILL_BUDGET_MIN = 256
_PREFILL_BUDGET_MAX = 4096


class PrefillCap(NamedTuple):
    """Prompt tokens that a tick may carry, and the most tokens in one of its steps."""

    tokens: int
    step_tokens: int


def tick_target_ns(limits: SchedulerLimits, *, is_open: bool, cuts_are_free: bool) -> int:
    """`is_open`: a lane is free or about to be, or somebody urgent waits."""
    if cuts_are_free:
        target_ms = _FREE_CUT_MS if is_open else _FREE_CUT_BUSY_MS
    else:
        target_ms = OPEN_NS // _MS if is_open else limits.tick_target_ms
    return min(target_ms, limits.tick_target_ms) * _MS


def prefill_cap(limits: SchedulerLimits, rates: Rates, *, is_open: bool) -> PrefillCap:
    """At most about 0.5 s of prompt while a newcomer could come in at the end of the tick, else 8 s (S13)."""
    tokens = limits.prefill_budget
    rate = rates.prefill_rate
    if not tokens:
        wanted = round(rate * limits.tick_target_ms / 1000) or _PREFILL_BUDGET_MIN
        tokens = max(_PREFILL_BUDGET_MIN, min(_PREFILL_BUDGET_MAX, wanted))
    if not rate:
        return PrefillCap(tokens, limits.step_tokens)
    limit_ns = _PREFILL_OPEN_NS if is_open else _PREFILL_BUSY_NS
    chunk, step_tokens = _CHUNK, limits.step_tokens
    if rates.prefill_added_ns(_CHUNK) > limit_ns:
        chunk, step_tokens = _SMALL_CHUNK, min(step_tokens, max(_SMALL_CHUNK, limits.lanes + 1))
    affordable = limit_ns // max(1, rates.prefill_added_ns(chunk)) * chunk
    return PrefillCap(min(tokens, max(chunk, affordable)), step_tokens)


def prefill_steps(tokens: int, step_tokens: int, decoding: int) -> int:
    """Forward passes that `tokens` prompt tokens take beside `decoding` lanes."""
    return -(-tokens // max(1, step_tokens - decoding)) if tokens else 0


def decode_rounds(limits: SchedulerLimits, rates: Rates, lanes: int, left_ns: int) -> int:
    """Decode steps of `lanes` lanes that fit into `left_ns`; 1 while the cost of a step is unknown."""
    step_ns = rates.step_ns(lanes)
    rounds = max(1, left_ns // step_ns) if step_ns else 1
    if limits.decode_budget:
        rounds = min(rounds, max(1, limits.decode_budget // max(1, lanes)))
    return rounds
