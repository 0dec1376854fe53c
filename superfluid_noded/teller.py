"""Effects of the scheduler become frames of links, one TOKENS frame a step and link.

The lease of a session is judged here, after sampling and directly before its frame is queued (fleet.md 5): a lapsed one is
fenced, its tokens are dropped and it never speaks again. What a session's end is told to the head exactly once. Effects of
sessions that are not in the roster any more (cancelled by a lost link, superseded, fenced) are dropped: nobody waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from superfluid_core.clock import MS, SECOND, Clock
from superfluid_core.errors import ErrorCode
from superfluid_core.limits import LinkLimits, WireLimits
from superfluid_core.logs import log
from superfluid_core.scheduler.plan import (
    Accepted,
    Effect,
    Emit,
    Emits,
    Finish,
    Interrupt,
    Progress,
    Reject,
    TickPlan,
)
from superfluid_core.session import FinishReason
from superfluid_core.wire.messages import CloseReason, Opened, ProgressReport, Refuse
from superfluid_core.wire.notes import Timing
from superfluid_noded.agent import Agent, Observer
from superfluid_noded.heads import Live
from superfluid_noded.outbound import Frames

logger = logging.getLogger(__name__)

SILENCE_NS = 800 * MS
US = 1_000
_OfSession = Accepted | Progress | Emit | Finish | Reject


@dataclass(slots=True)
class _Said:
    """What one list of effects came to: frames by link, who may speak by serial, whose lease was found lapsed."""

    frames: dict[int, Frames]
    judged: dict[int, bool]
    lapsed: list[Live]


class Teller:
    """Speaks to heads. `tell` is the engine loop's `on_effects`."""

    def __init__(self, agent: Agent, clock: Clock, observer: Observer, limits: LinkLimits) -> None:
        self._agent = agent
        self._roster = agent.roster
        self._clock = clock
        self._observer = observer
        self._progress_ns = limits.progress_ms * MS
        self._wire = WireLimits()
        self._now_ns = 0
        self._completed: dict[str, int] = {}
        self.steps: Callable[[], int] = lambda: 0

    def tell(self, effects: list[Effect]) -> None:
        """Queue everything that one list of effects means, per link."""
        self._now_ns = self._clock.now_ns()
        said = _Said({}, {}, [])
        for effect in effects:
            if isinstance(effect, Emits):
                for row in effect:
                    self._tell_one(row, said)
            elif not isinstance(effect, Interrupt):
                self._tell_one(effect, said)
        self._send(said.frames)
        self._agent.end(said.lapsed, CloseReason.FENCED, ErrorCode.FENCED)

    def _send(self, frames: dict[int, Frames]) -> None:
        for number, gathered in frames.items():
            head = self._roster.heads.get(number)
            if head is None:
                continue
            messages = gathered.take()
            opened = [each for each in messages if isinstance(each, Opened)]
            if len(opened) == len(messages):  # to be taken is no news that anybody acts on
                self._roster.hold(head, opened)
            else:
                self._roster.send(head, messages)
        for tenant, count in self._completed.items():
            self._observer.tokens(tenant, "completion", count)
        self._completed.clear()

    def planned(self, plan: TickPlan) -> None:
        """Note who got a lane: the end of its wait in the queue."""
        now_ns = self._clock.now_ns()
        for start in plan.starts:
            live = self._roster.live.get(start.spec.key.session)
            if live is not None and live.started_ns == 0:
                live.started_ns, live.started_step = now_ns, self.steps()
                self._observer.queue_waited(live.qos, (now_ns - live.submitted_ns) / SECOND)

    def silent(self) -> list[Live]:
        """List the sessions of which nothing was said for almost a second."""
        before_ns = self._clock.now_ns() - SILENCE_NS
        return [live for live in self._roster.live.values() if live.reported_ns <= before_ns]

    def reassure(self, waiting: Iterable[Live]) -> None:
        """Repeat the last word about sessions that queue or prefill: they are known here and not forgotten."""
        now_ns = self._clock.now_ns()
        for live in waiting:
            live.reported_ns = now_ns
            total = max(live.done, live.total)
            report = ProgressReport(live.number, live.epoch, live.done, total, live.cached)
            self._roster.send(live.head, (report,))

    def _may_speak(self, live: Live) -> bool:
        return self._roster.table.may_emit(live.placement, self._clock.boot_ns())

    def _tell_one(self, effect: _OfSession, said: _Said) -> None:
        live = self._roster.live.get(effect.key.session)
        if live is None:
            return
        serial = live.placement.serial
        may_speak = said.judged.get(serial)
        if may_speak is None:
            may_speak = said.judged[serial] = self._may_speak(live)
            if not may_speak:
                said.lapsed.append(live)
        if not may_speak:
            return
        frames = said.frames.get(live.head.number)
        if frames is None:
            frames = said.frames[live.head.number] = Frames(self._wire)
        self._spell(live, effect, frames)

    def _spell(self, live: Live, effect: _OfSession, frames: Frames) -> None:
        match effect:
            case Emit():
                live.outputs = effect.index + 1
                self._observe_token(live, frames)
                frames.emit(live.number, live.epoch, effect)
            case Accepted():
                live.cached = effect.cached_tokens
                opened = Opened(live.number, live.epoch, effect.cached_tokens, effect.position)
                frames.add(opened)
            case Progress():
                self._progress(live, effect, frames)
            case Finish():
                self._finish(live, effect, frames)
            case Reject():
                self._reject(live, effect, frames)

    def _progress(self, live: Live, effect: Progress, frames: Frames) -> None:
        now_ns = self._now_ns
        if live.total == 0:
            self._observer.tokens(live.tenant, "prompt", effect.total - effect.cached)
        live.done, live.total, live.cached = effect.done, effect.total, effect.cached
        if effect.done < effect.total and now_ns - live.reported_ns < self._progress_ns:
            return
        live.reported_ns = now_ns
        report = ProgressReport(live.number, live.epoch, effect.done, effect.total, effect.cached)
        frames.add(report)

    def _observe_token(self, live: Live, frames: Frames) -> None:
        now_ns = self._now_ns
        if live.emitted_ns == 0:
            self._note_first(live, frames)
            self._observer.first_token(live.qos, (now_ns - live.submitted_ns) / SECOND)
        else:
            self._observer.next_token(live.qos, (now_ns - live.emitted_ns) / SECOND)
        live.emitted_ns = live.reported_ns = now_ns
        self._completed[live.tenant] = self._completed.get(live.tenant, 0) + 1

    def _note_first(self, live: Live, frames: Frames) -> None:
        """Tell how long it took, before the first token leaves."""
        live.first_ns, live.first_step = self._now_ns, self.steps()
        if live.head.wants_timing:
            lane_ns = live.started_ns or live.submitted_ns
            queued_us = max(0, lane_ns - live.submitted_ns) // US
            prefill_us = max(0, live.first_ns - lane_ns) // US
            frames.add(Timing(live.number, live.epoch, queued_us, prefill_us))

    def _finish(self, live: Live, effect: Finish, frames: Frames) -> None:
        self._roster.forget(live, effect.reason.value, purge=False)
        self._observer.ended(effect.reason.value)
        frames.finish(live.number, live.epoch, live.outputs, effect)
        if effect.reason is FinishReason.ERROR:
            fields = {"head": live.head.name, "session": live.number, "code": effect.code}
            log(logger, "warning", "session failed", **fields, text=effect.text)
        self._agent.on_change()

    def _reject(self, live: Live, effect: Reject, frames: Frames) -> None:
        self._roster.forget(live, effect.code.value, purge=False)
        self._observer.refused(effect.code)
        refuse = Refuse(
            effect.code,
            effect.text[: self._wire.text_chars_max],
            effect.retry_after_ms,
            live.number,
            live.epoch,
        )
        frames.add(refuse)
        self._agent.on_change()
