"""Who may come in: verdicts at Submit (refuse) and at admission (hold), G1 to G6 of scheduler.md.

A refusal says whether a retry can help and when. A hold leaves the session at the head of its class. Nothing here
changes a session; `Thrash` keeps its own window.
"""

from __future__ import annotations

from enum import StrEnum

from superfluid_core.errors import ErrorCode
from superfluid_core.scheduler.plan import PressureLevel, Reject
from superfluid_core.scheduler.records import Session
from superfluid_core.scheduler.rules import Reserve
from superfluid_core.scheduler.state import State
from superfluid_core.session import QosClass, SessionSpec

_MS = 1_000_000
_RETRY_MS_MIN = 1_000
_RETRY_MS_MAX = 60_000


class Hold(StrEnum):
    """Why a waiting session was not admitted."""

    BLOCKS = "blocks"
    RESERVATION = "reservation"
    CLASS = "class"
    STEP = "step"
    THRASH = "thrash"
    PRESSURE = "pressure"


def judge_spec(state: State, spec: SessionSpec) -> Reject | None:
    """Refuse what can never succeed: a retry must not be invited (G2)."""
    prompt = len(spec.prompt)
    if spec.key in state.sessions:
        return _refuse(spec, ErrorCode.INVALID_REQUEST, "a session of this key is running")
    if not prompt:
        return _refuse(spec, ErrorCode.INVALID_REQUEST, "the prompt holds no token")
    shape = state.accounts.shape
    if prompt + 1 > shape.window:
        text = f"{prompt} prompt tokens leave no room in a context window of {shape.window}"
        return _refuse(spec, ErrorCode.CONTEXT_LENGTH_EXCEEDED, text)
    places = shape.blocks * shape.block_tokens
    if prompt > places:
        text = f"{prompt} prompt tokens exceed the KV pool of {places} tokens"
        return _refuse(spec, ErrorCode.CONTEXT_LENGTH_EXCEEDED, text)
    return None


def judge_load(state: State, spec: SessionSpec) -> Reject | None:
    """Refuse what cannot be taken now: draining, a full queue (G1), a hopeless wait (G5)."""
    if state.draining:
        return _refuse(spec, ErrorCode.DRAINING, "no new sessions: draining", 0, retryable=True)
    limits = state.limits
    queued = len(state.queues)
    tokens = len(spec.prompt) + len(spec.delivered)
    # those who will leave the queue for a free lane at the next tick are not waiting
    if queued >= limits.queue_max + state.lanes.free:
        return _busy(state, spec, f"{queued} sessions are queued")
    limit = limits.queued_tokens_max
    if limit and queued and state.queues.tokens + tokens > limit:
        return _busy(state, spec, f"{state.queues.tokens} prompt tokens are queued")
    slo_ms = state.rules.ttft_slo_ms
    if slo_ms:
        predicted_ms = first_token_ns(state, spec.qos, tokens) // _MS
        if predicted_ms > slo_ms:
            text = f"the first token is predicted after {predicted_ms} ms, over {slo_ms} ms"
            late = _clamp(predicted_ms - slo_ms)
            return _refuse(spec, ErrorCode.SLO_UNATTAINABLE, text, late, retryable=True)
    return None


def first_token_ns(state: State, qos: QosClass, tokens: int) -> int:
    """Predict a newcomer's time to the first token: the wait for a lane, then the prompts before its own.

    Too low while rates are unknown (0 then): an unmeasured engine refuses nobody.
    """
    ahead = state.ahead_of(qos)
    wait_ns = 0
    if ahead >= state.lanes.free:
        wait_ns = state.rates.drain_ns(ahead - state.lanes.free + 1, state.lanes.total)
    unfinished = sum(each.remaining for each in state.lanes.prefilling.values() if each.qos <= qos)
    return wait_ns + state.rates.prefill_ns(unfinished + tokens)


def hold(state: State, session: Session, now_ns: int) -> Hold | None:
    """Say why a waiting session must wait on although a lane is free (S5, G3, G4, G6)."""
    if is_class_full(state, session.qos):
        return Hold.CLASS
    if state.rules.hold_oversized and len(session.context) > state.limits.step_tokens:
        return Hold.STEP
    if state.lanes.busy >= state.thrash.lanes_allowed(now_ns):
        return Hold.THRASH
    if is_pressed(state, session.qos):
        return Hold.PRESSURE
    if state.accounts.fits(session):
        return None
    if state.trim_all() and state.accounts.fits(session):
        return None
    is_for_output = state.rules.reserve is Reserve.FULL
    if is_for_output and state.accounts.fits(session, prompt_only=True):
        return Hold.RESERVATION
    return Hold.BLOCKS


def is_class_full(state: State, qos: QosClass) -> bool:
    cap = state.rules.class_lanes.get(qos)
    return cap is not None and state.lanes.of_class(qos) >= cap


def is_pressed(state: State, qos: QosClass) -> bool:
    """Background sessions wait while the host is short of memory, unless nothing else runs."""
    is_critical = state.pressure is PressureLevel.CRITICAL
    return is_critical and qos is QosClass.BACKGROUND and state.lanes.busy > 0


def _clamp(milliseconds: int) -> int:
    return max(_RETRY_MS_MIN, min(_RETRY_MS_MAX, milliseconds))


def _busy(state: State, spec: SessionSpec, text: str) -> Reject:
    drain_ns = state.rates.drain_ns(len(state.queues), state.lanes.total)
    return _refuse(spec, ErrorCode.QUEUE_FULL, text, _clamp(drain_ns // _MS), retryable=True)


def _refuse(
    spec: SessionSpec,
    code: ErrorCode,
    text: str,
    retry_after_ms: int | None = None,
    *,
    retryable: bool = False,
) -> Reject:
    return Reject(spec.key, code, text, retryable, retry_after_ms or None)
