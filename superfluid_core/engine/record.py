"""Everything that a scheduler was told, written down so that a fresh one can be told the same: an exact replay.

A recording is lines of JSON: a header (limits, rules, pool), then one line per call (`receive`, `plan`, a pin) with a digest
of what came out. Replaying it must give the same digests; the first that differs is named. Without content it holds
lengths and salted hashes (`record_forms.py`), and the salt is not written. Digests cover shapes (keys, indices, blocks, counts, reasons), never ids. Pure: lines in, lines out; nothing here opens a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from superfluid_core.engine.record_forms import (
    Digest,
    StandIns,
    effect_shape,
    pack_ids,
    plain_settings,
    plan_shape,
    restore_settings,
    unpack_ids,
)
from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import (
    Cancel,
    Drain,
    Effect,
    Finish,
    Input,
    LaneFault,
    Pressure,
    PressureLevel,
    Reject,
    SetQos,
    StepDone,
    Submit,
    TickDone,
    TickOutcome,
    TickPlan,
)
from superfluid_core.scheduler.rules import Rules
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_core.scheduler.stats import SchedulerStats
from superfluid_core.session import FinishReason, QosClass, SessionKey, SessionSpec

FORMAT = "superfluid-recording/2"


class RecordingError(SuperfluidError):
    """Raised when a recording cannot be read; names the line."""

    code = ErrorCode.INVALID_REQUEST


# --- writing ----------------------------------------------------------------------------------------


class Recorder:
    """Turns the calls of one scheduler into lines, in order. `salt` None keeps token ids."""

    def __init__(self, salt: bytes | None) -> None:
        self._ids = StandIns(salt)
        self._has_content = salt is None
        self._digest = Digest()
        self._lanes: dict[int, SessionKey] = {}

    def header(
        self, limits: SchedulerLimits, rules: Rules, pool: PoolShape, *, cuts_are_free: bool
    ) -> str:
        shares = tuple((self._ids.name(name), share) for name, share in rules.tenant_weights)
        rules = replace(rules, tenant_weights=shares)
        settings = {
            "limits": plain_settings(limits),
            "rules": plain_settings(rules),
            "pool": plain_settings(pool),
        }
        return _line({"format": FORMAT, "content": self._has_content, "cuts_are_free": cuts_are_free}
                     | settings)  # fmt: skip

    def received(self, inputs: Sequence[Input], effects: Sequence[Effect], now_ns: int) -> str:
        written = [self._input(each) for each in inputs]
        digest = self._digest.absorb([effect_shape(each) for each in effects])
        for effect in effects:
            if isinstance(effect, Finish | Reject):
                self._ids.close(effect.key)
        return _line(["receive", now_ns, written, digest])

    def planned(self, plan: TickPlan | None, now_ns: int) -> str:
        return _line(["plan", now_ns, self._plan(plan)])

    def foreseen(self, plan: TickPlan) -> str:
        """Write down the plan behind the one in flight, made while that runs."""
        return _line(["foresee", self._plan(plan)])

    def _plan(self, plan: TickPlan | None) -> str:
        if plan is not None:
            for lane in plan.frees:
                self._lanes.pop(lane, None)
            for start in plan.starts:
                self._lanes[start.lane] = start.spec.key
        return self._digest.absorb(plan_shape(plan))

    def pinned(self, place: int, *, pinned: bool) -> str:
        """`place` is the block's place among all names of the cache: names themselves are salted."""
        return _line(["pin", place, pinned])

    def end(self) -> str:
        return _line(["end", self._digest.whole()])

    def _key(self, key: SessionKey) -> list[Any]:
        return [self._ids.name(key.head), key.session]

    def _input(self, item: Input) -> list[Any]:
        match item:
            case Submit():
                return ["submit", self._spec(item.spec)]
            case Cancel():
                return ["cancel", self._key(item.key), item.reason.value]
            case SetQos():
                return ["qos", self._key(item.key), int(item.qos)]
            case StepDone():
                return ["step", *self._step(item)]
            case TickDone():
                followed = [True] if item.is_followed else []
                return [
                    "tick",
                    item.tick,
                    item.outcome.value,
                    item.steps,
                    item.elapsed_ns,
                    *followed,
                ]
            case Pressure():
                return ["pressure", item.level.value]
            case Drain():
                return ["undrain"] if item.is_over else ["drain"]

    def _spec(self, spec: SessionSpec) -> dict[str, Any]:
        prompt, delivered, stops = self._ids.open(spec)
        return {
            "key": self._key(spec.key),
            "prompt": pack_ids(prompt),
            "delivered": pack_ids(delivered),
            "stop_ids": pack_ids(stops),
            "max_output": spec.max_output,
            "min_output": spec.min_output,
            "qos": int(spec.qos),
            "tenant": self._ids.name(spec.tenant),
            "batch_invariant": spec.batch_invariant,
            "cache_salt": self._ids.salted(spec.cache_salt).hex(),
            "deadline_ns": spec.deadline_ns,
            "start_deadline_ns": spec.start_deadline_ns,
            "prompt_logprobs": spec.prompt_logprobs,
            "weight": spec.weight,
        }

    def _step(self, step: StepDone) -> list[Any]:
        pairs = zip(step.lanes, step.ids, strict=True)
        ids = [self._ids.output(self._lanes.get(lane), token) for lane, token in pairs]
        faults = [[each.lane, each.code.value, each.text] for each in step.faults]
        prefilled = [list(each) for each in step.prefilled]
        head = [step.tick, step.step, list(step.lanes), ids, prefilled]
        return [*head, step.tokens, step.elapsed_ns, faults]


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


# --- replaying --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a replay went. `diverged_at` is the first line whose digest differs, None when all are equal.

    It ends there: what a scheduler is told after another decision makes no sense to it. `is_whole` says that the recording
    has its last line: a node that was killed leaves one without.
    """

    calls: int
    digest: str
    diverged_at: int | None
    is_whole: bool
    stats: SchedulerStats


def replay(lines: Iterable[str]) -> Replayed:
    """Tell a fresh scheduler what the recorded one was told. Raises RecordingError."""
    scheduler: Scheduler | None = None
    digest = Digest()
    calls = 0
    diverged_at: int | None = None
    is_whole = False
    call: Any = None
    for number, line in enumerate(lines, start=1):
        try:
            call = json.loads(line)
            if scheduler is None:
                scheduler = _scheduler(call)
                continue
            is_equal = _apply(scheduler, call, digest)
        except (
            AssertionError
        ):  # it decided otherwise before, unseen: the engine's answers do not fit
            is_equal = False
        except (ValueError, KeyError, TypeError, IndexError, SuperfluidError) as error:
            raise RecordingError(f"recording, line {number}: {str(error)[:120]}") from None
        is_whole = call[0] == "end"
        calls += not is_whole
        if not is_equal:
            diverged_at = number
            break
    if scheduler is None:
        raise RecordingError("the recording is empty")
    return Replayed(calls, digest.whole(), diverged_at, is_whole, scheduler.stats())


def _scheduler(header: Any) -> Scheduler:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"not a recording of the form {FORMAT}")
    return Scheduler(
        restore_settings(SchedulerLimits, header["limits"]),
        restore_settings(PoolShape, header["pool"]),
        rules=restore_settings(Rules, header["rules"]),
        cuts_are_free=bool(header["cuts_are_free"]),
    )


def _apply(scheduler: Scheduler, call: Any, digest: Digest) -> bool:
    """Make one call; says whether what came out is what was recorded."""
    match call:
        case ["receive", int(now_ns), list(written), str(expected)]:
            effects = scheduler.receive([_input(each) for each in written], now_ns)
            return digest.absorb([effect_shape(each) for each in effects]) == expected
        case ["plan", int(now_ns), str(expected)]:
            return digest.absorb(plan_shape(scheduler.plan(now_ns))) == expected
        case ["foresee", str(expected)]:
            foreseen = scheduler.foresee()
            plan = None if foreseen is None else foreseen.plan
            return digest.absorb(plan_shape(plan)) == expected
        case ["pin", int(place), bool(pinned)]:
            return scheduler.pin_prefix(scheduler.prefix_names()[place], pinned=pinned)
        case ["end", str(expected)]:
            return digest.whole() == expected
        case _:
            raise ValueError("an unknown call")


def _key(written: Sequence[Any]) -> SessionKey:
    return SessionKey(str(written[0]), int(written[1]))


def _input(written: Sequence[Any]) -> Input:
    match written:
        case ["submit", dict(spec)]:
            return Submit(_spec(spec))
        case ["cancel", key, str(reason)]:
            return Cancel(_key(key), FinishReason(reason))
        case ["qos", key, int(qos)]:
            return SetQos(_key(key), QosClass(qos))
        case ["step", tick, step, lanes, ids, prefilled, tokens, elapsed_ns, faults]:
            done = [(lane, count) for lane, count in prefilled]
            failed = [LaneFault(lane, ErrorCode(code), text) for lane, code, text in faults]
            return StepDone(tick, step, lanes, ids, done, tokens, elapsed_ns, faults=failed)
        case ["tick", int(tick), str(outcome), int(steps), int(elapsed_ns), *followed]:
            return TickDone(tick, TickOutcome(outcome), steps, elapsed_ns, bool(followed))
        case ["pressure", str(level)]:
            return Pressure(PressureLevel(level))
        case ["drain" | "undrain" as word]:
            return Drain(is_over=word == "undrain")
        case _:
            raise ValueError("an unknown input")


def _spec(spec: Mapping[str, Any]) -> SessionSpec:
    return SessionSpec(
        key=_key(spec["key"]),
        model="",
        prompt=unpack_ids(spec["prompt"]),
        max_output=spec["max_output"],
        delivered=unpack_ids(spec["delivered"]),
        min_output=spec["min_output"],
        stop_ids=frozenset(unpack_ids(spec["stop_ids"])),
        qos=QosClass(spec["qos"]),
        tenant=spec["tenant"],
        batch_invariant=spec["batch_invariant"],
        cache_salt=bytes.fromhex(spec["cache_salt"]),
        deadline_ns=spec["deadline_ns"],
        start_deadline_ns=spec["start_deadline_ns"],
        prompt_logprobs=spec["prompt_logprobs"],
        weight=spec.get("weight", 1),
    )
