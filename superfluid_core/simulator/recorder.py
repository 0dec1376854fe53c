"""Turns plans, steps and effects of one scheduler into a `RunResult`.

It keeps a record per live session, and of finished ones the first 20,000; the rest live on in the distributions of their
cohorts. Preemptions are read off the plans: a lane that changed hands while its session lives was taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from superfluid_core.engine.compose import Step, StepRow
from superfluid_core.scheduler.plan import (
    Accepted,
    Effect,
    Emits,
    Finish,
    Interrupt,
    Progress,
    Reject,
    TickPlan,
)
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_core.session import SessionKey
from superfluid_core.simulator.flags import MS, Flags
from superfluid_core.simulator.records import (
    SESSIONS_KEPT_MAX,
    TIMELINE_MAX,
    Cohort,
    Preempted,
    RunResult,
    SessionRecord,
    StepRecord,
)
from superfluid_core.simulator.scenario import Arrival

SAMPLE_EVERY = 64


class _Lane:
    """What is known of a lane from the last plan and the steps since."""

    __slots__ = ("blocks", "key", "name", "tokens")

    def __init__(self, key: SessionKey, name: str) -> None:
        self.key = key
        self.name = name
        self.blocks = 0
        self.tokens = 0


class _Live:
    """A session that has not ended: its record, who it counts for, and a run of equal gaps between tokens."""

    __slots__ = ("cohorts", "gap_ns", "gaps", "record")

    def __init__(self, record: SessionRecord, cohorts: tuple[Cohort, Cohort]) -> None:
        self.record = record
        self.cohorts = cohorts
        self.gap_ns = 0
        self.gaps = 0

    def add_gap(self, gap_ns: int) -> None:
        if gap_ns != self.gap_ns:
            self.flush()
            self.gap_ns = gap_ns
            self.record.gap_max_ns = max(self.record.gap_max_ns, gap_ns)
        self.gaps += 1

    def flush(self) -> None:
        if self.gaps:
            for cohort in self.cohorts:
                cohort.itl.add(self.gap_ns, self.gaps)
            self.gaps = 0


class Recorder:
    """Implements `node.Observer` for one node."""

    def __init__(self, result: RunResult, flags: Flags, on_end: Callable[[], None]) -> None:
        self.result = result
        self._flags = flags
        self._on_end = on_end
        self._live: dict[SessionKey, _Live] = {}
        self._lanes: dict[int, _Lane] = {}
        self._used = self._queued = 0
        self._preempted: list[Preempted] = []
        self._present = 0
        self._changed_ns = 0
        self._plans = 0

    @property
    def live(self) -> int:
        return len(self._live)

    # --- what happens -----------------------------------------------------------------------------

    def on_arrival(self, arrival: Arrival, key: SessionKey) -> None:
        record = SessionRecord(arrival)
        live = self._live[key] = _Live(record, self._cohorts(arrival))
        self._change(arrival.at_ns, 1)
        for cohort in live.cohorts:
            cohort.arrived += 1
        if len(self.result.sessions) < SESSIONS_KEPT_MAX:
            self.result.sessions.append(record)

    def on_plan(self, plan: TickPlan, scheduler: Scheduler) -> None:
        for lane in (*plan.frees, *(start.lane for start in plan.starts)):
            held = self._lanes.pop(lane, None)
            live = self._live.get(held.key) if held is not None else None
            if held is not None and live is not None:
                live.record.preempted += 1
                self._preempted.append(Preempted(held.name, held.blocks, held.tokens))
        for start in plan.starts:
            name = self._live[start.spec.key].record.arrival.name
            self._lanes[start.lane] = _Lane(start.spec.key, name)
        for each in plan.lanes:
            holder = self._lanes[each.lane]
            holder.blocks = len(each.blocks)
            holder.tokens = each.computed
        if len(self.result.steps) < TIMELINE_MAX or not self._plans % SAMPLE_EVERY:
            stats = scheduler.stats()
            self._used = stats.blocks_used
            self._queued = sum(stats.queued)
            self.result.occupancy.add(stats.blocks_used)
            self.result.lanes_max = max(self.result.lanes_max, stats.lanes_busy)
        self._plans += 1

    def on_step(self, step: Step, start_ns: int, end_ns: int) -> None:
        result = self.result
        rows = step.rows()
        for row in rows:
            lane = self._lanes[row.lane]
            lane.tokens = row.position + len(row.inputs)
            if not row.decoding:
                self._begin(lane.key, start_ns)
        result.step_count += 1
        result.lane_steps += len(rows)
        result.busy_ns += end_ns - start_ns
        result.prompt_tokens += step.prompt_tokens
        if len(result.steps) < TIMELINE_MAX:
            result.steps.append(self._record(rows, start_ns, end_ns))
        self._preempted = []

    def on_effects(self, effects: Sequence[Effect], now_ns: int) -> None:
        for effect in effects:
            match effect:
                case Emits():
                    for key in effect.keys:
                        self._emit(self._live[key], now_ns)
                case Finish():
                    self._finish(effect, now_ns)
                case Progress():
                    self._live[effect.key].record.cached = effect.cached
                case Reject():
                    self._reject(effect, now_ns)
                case Accepted() | Interrupt():
                    pass

    def close(self, now_ns: int, scheduler: Scheduler) -> RunResult:
        """End the run: whoever lives now was stranded, or cut off by the run's end."""
        self._change(now_ns, 0)
        self.result.ended_ns = now_ns
        self.result.stats = scheduler.stats()
        self.result.stranded = len(self._live)
        return self.result

    # --- within -----------------------------------------------------------------------------------

    def _cohorts(self, arrival: Arrival) -> tuple[Cohort, Cohort]:
        name = arrival.qos.label + (f" {arrival.cohort}" if arrival.cohort else "")
        cohorts, tenants = self.result.cohorts, self.result.tenants
        if name not in cohorts:
            cohorts[name] = Cohort()
        if arrival.tenant not in tenants:
            tenants[arrival.tenant] = Cohort()
        return cohorts[name], tenants[arrival.tenant]

    def _change(self, now_ns: int, by: int) -> None:
        self.result.area_ns += self._present * (now_ns - self._changed_ns)
        self._changed_ns = now_ns
        self._present += by

    def _begin(self, key: SessionKey, now_ns: int) -> None:
        live = self._live.get(key)
        if live is None or live.record.started_ns is not None:
            return
        live.record.started_ns = now_ns
        for cohort in live.cohorts:
            cohort.wait.add(now_ns - live.record.arrival.at_ns)

    def _emit(self, live: _Live, now_ns: int) -> None:
        record = live.record
        record.output += 1
        if record.last_token_ns is None:
            record.first_token_ns = now_ns
            for cohort in live.cohorts:
                cohort.ttft.add(now_ns - record.arrival.at_ns)
        else:
            live.add_gap(now_ns - record.last_token_ns)
        record.last_token_ns = now_ns

    def _finish(self, effect: Finish, now_ns: int) -> None:
        live = self._live.pop(effect.key)
        live.flush()
        record = live.record
        record.finished_ns = now_ns
        record.reason = str(effect.reason)
        self._change(now_ns, -1)
        is_good = self._is_good(record)
        for cohort in live.cohorts:
            cohort.finished += 1
            cohort.output_tokens += record.output
            cohort.stay.add(now_ns - record.arrival.at_ns)
            if is_good:
                cohort.good += 1
                cohort.good_tokens += record.output
        if self.result.steps and self.result.step_count == len(self.result.steps):
            self.result.steps[-1].finished.append(record.arrival.name)
        self._on_end()

    def _reject(self, effect: Reject, now_ns: int) -> None:
        live = self._live.pop(effect.key)
        live.record.rejected = str(effect.code)
        self._change(now_ns, -1)
        for cohort in live.cohorts:
            cohort.rejected += 1
        self._on_end()

    def _is_good(self, record: SessionRecord) -> bool:
        """Within the service level: the first token, and the mean gap between tokens."""
        flags = self._flags
        ttft = record.ttft_ns
        if ttft is None or (flags.slo_ttft_ms and ttft > flags.slo_ttft_ms * MS):
            return False
        if not flags.slo_itl_ms or record.output < 2:
            return True
        assert record.first_token_ns is not None, "a first token has a time"
        assert record.last_token_ns is not None, "a first token is a last token"
        spread = record.last_token_ns - record.first_token_ns
        return spread <= flags.slo_itl_ms * MS * (record.output - 1)

    def _record(self, rows: list[StepRow], start_ns: int, end_ns: int) -> StepRecord:
        lanes = self._lanes
        return StepRecord(
            self.result.step_count,
            start_ns,
            end_ns,
            tuple(lanes[row.lane].name for row in rows if row.decoding),
            tuple((lanes[row.lane].name, len(row.inputs)) for row in rows if not row.decoding),
            self._used,
            self._flags.pool.blocks - self._used,
            self._queued,
            tuple(self._preempted),
        )
