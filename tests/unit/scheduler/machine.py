"""Random schedules with a step always in flight, over small pools, checked against the laws of rig.py.

A plan is launched whenever none is in flight, so every input arrives in the middle of a tick. At the end faults stop, the
rig ticks on, and every session must have ended (liveness), with the output of an uninterrupted run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from superfluid_core.errors import ErrorCode
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler import gates
from superfluid_core.scheduler.plan import (
    Cancel,
    Drain,
    Input,
    LaneFault,
    Pressure,
    PressureLevel,
    SetQos,
    Submit,
    TickOutcome,
)
from superfluid_core.scheduler.rules import (
    Batching,
    PreemptMode,
    PrefillMode,
    QueueOrder,
    Reserve,
    Rules,
    Victim,
)
from superfluid_core.scheduler.scheduler import PoolShape
from superfluid_core.session import QosClass, SessionKey, SessionSpec
from tests.unit.scheduler.rig import MS, Rig, key, sampling

# few prompts, so that prefixes are shared; the third one shares its front with the first
_TEXTS = (
    tuple(place % 7 for place in range(60)),
    tuple(place % 5 for place in range(60)),
    tuple(place % 7 for place in range(9)) + tuple(place % 3 for place in range(60)),
)
_MODES = [*[PrefillMode.CHUNKED] * 3, PrefillMode.MONOLITHIC, PrefillMode.ALTERNATING]
# one position of KV is a byte, and a block has four
_BLOCK_BYTES = 4
_RULES = st.builds(
    Rules,
    batching=st.sampled_from([Batching.CONTINUOUS] * 4 + [Batching.STATIC]),
    prefill_mode=st.sampled_from(_MODES),
    queue_order=st.sampled_from(QueueOrder),
    class_lanes=st.sampled_from([{}, {QosClass.BACKGROUND: 1}]),
    tenant_lanes=st.sampled_from([0, 0, 1]),
    reserve=st.sampled_from(Reserve),
    thrash_pct=st.sampled_from([0, 20]),
    victim=st.sampled_from(Victim),
    admit_after_preempt=st.booleans(),
)


def _with_host(rules: Rules, blocks: int, mode: PreemptMode) -> Rules:
    if not blocks:
        return rules
    return replace(rules, park=True, park_bytes=blocks * _BLOCK_BYTES, preempt_mode=mode)


_RULES_AND_HOST = st.builds(
    _with_host,
    _RULES,
    st.sampled_from([0, 8, 16, 60]),
    st.sampled_from([PreemptMode.SWAP, *PreemptMode]),
)


class _Order(NamedTuple):
    """What to submit; options are rare."""

    text: tuple[int, ...]
    prompt: int
    delivered: int
    max_output: int
    min_output: int
    qos: QosClass
    tenant: str
    option: str


_ORDERS = st.builds(
    _Order,
    st.sampled_from(_TEXTS),
    st.integers(1, 44) | st.sampled_from([8, 12, 16, 24]),
    st.sampled_from([0, 0, 0, 2, 6]),
    st.integers(1, 24),
    st.sampled_from([0, 3]),
    st.sampled_from(QosClass),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["", "", "", "stop", "deadline", "solo"]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a Rig; `Rig.give` and `Rig.launch` check the invariants after every input and plan."""

    sessions: Bundle[SessionKey] = Bundle("sessions")

    @initialize(
        lanes=st.sampled_from([1, 1, 2, 3, 4]),
        blocks=st.integers(3, 16),
        step=st.sampled_from([5, 6, 8, 32]),
        budget=st.sampled_from([4, 16, 64]),
        watermark=st.sampled_from([0, 10]),
        rules=st.tuples(_RULES_AND_HOST, st.booleans()),
    )
    def begin(
        self,
        lanes: int,
        blocks: int,
        step: int,
        budget: int,
        watermark: int,
        rules: tuple[Rules, bool],
    ) -> None:
        limits = SchedulerLimits(
            lanes=lanes,
            step_tokens=step,
            prefill_budget=budget,
            queue_max=6,
            watermark_pct=watermark,
            tick_target_ms=60,
            starvation_ticks=4,
        )
        shape = PoolShape(4, blocks, 40, kv_bytes_per_token=1, host_copy_bytes_per_s=1e9)
        self.rig = Rig(limits, shape, *rules)
        self.number = 0
        self.refusals = 0

    @rule(target=sessions, orders=st.lists(_ORDERS, min_size=1, max_size=5))
    def submit(self, orders: list[_Order]) -> MultipleResults[SessionKey]:
        specs = [self._spec(order) for order in orders]
        self._give(*(Submit(spec) for spec in specs))
        return multiple(*(spec.key for spec in specs))

    @rule(target=sessions, order=_ORDERS, more=st.integers(0, 5))
    def twins(self, order: _Order, more: int) -> MultipleResults[SessionKey]:
        """Two with one front, the second a little later: what sharing needs."""
        first = order._replace(delivered=0, option="")
        specs = [self._spec(first), self._spec(first._replace(prompt=first.prompt + more))]
        for spec in specs:
            self._give(Submit(spec))
            self.steps(1)
            self.launch()
        return multiple(*(spec.key for spec in specs))

    def _spec(self, order: _Order) -> SessionSpec:
        self.number += 1
        return SessionSpec(
            key=key(self.number),
            model="m",
            prompt=order.text[: order.prompt],
            delivered=tuple(range(order.delivered)),
            max_output=order.max_output,
            min_output=order.min_output,
            stop_ids=frozenset(range(10)) if order.option == "stop" else frozenset(),
            sampling=sampling(self.number % 2),
            qos=order.qos,
            tenant=order.tenant,
            batch_invariant=order.option == "solo",
            deadline_ns=self.rig.now_ns + 200 * MS if order.option == "deadline" else None,
        )

    @rule(of=consumes(sessions))
    def cancel(self, of: SessionKey) -> None:
        self._give(Cancel(of))

    @rule(pick=st.integers(0, 20))
    def cancel_live(self, pick: int) -> None:
        """Of those that wait or run, parked ones among them."""
        live = list(self.rig.state.sessions)
        if live:
            self._give(Cancel(live[pick % len(live)]))

    @rule(of=sessions, qos=st.sampled_from(QosClass))
    def set_qos(self, of: SessionKey, qos: QosClass) -> None:
        self._give(SetQos(of, qos))

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(count=st.integers(6, 12))
    def many_steps(self, count: int) -> None:
        self.steps(count)

    @rule(target=sessions, order=_ORDERS, count=st.integers(0, 4), is_crowded=st.booleans())
    def chat(self, order: _Order, count: int, is_crowded: bool) -> SessionKey:
        """Somebody urgent comes while others decode: what preemption by class needs."""
        calm = order._replace(delivered=0, min_output=0, option="")
        if is_crowded:
            small = calm._replace(qos=QosClass.BACKGROUND, prompt=min(order.prompt, 7))
            lanes = self.rig.state.lanes.total
            self._give(*(Submit(self._spec(small._replace(max_output=20))) for _ in range(lanes)))
            self.steps(2)
            self.launch()
        self.steps(count)
        urgent = calm._replace(qos=QosClass.INTERACTIVE, prompt=min(order.prompt, 6), max_output=2)
        spec = self._spec(urgent)
        self._give(Submit(spec))
        return spec.key

    @rule()
    def cancel_parked(self) -> None:
        for session in list(self.rig.state.queues):
            if session.parked is not None:
                self._give(Cancel(session.key))
                return

    @rule(
        pick=st.integers(0, 3), code=st.sampled_from([ErrorCode.LANE_FAULT, ErrorCode.NAN_LOGITS])
    )
    def fault(self, pick: int, code: ErrorCode) -> None:
        plan = self.rig.engine.plan
        if plan is not None and plan.lanes:
            lane = plan.lanes[pick % len(plan.lanes)].lane
            self._step(LaneFault(lane, code, "planted"))

    @rule()
    def interrupt(self) -> None:
        """The engine stops early, for reasons of its own."""
        if self.rig.engine.plan is not None:
            self.rig.end(TickOutcome.INTERRUPTED)

    @rule()
    def refuse(self) -> None:
        if self.rig.engine.plan is not None and not self.rig.engine.steps and self.refusals < 4:
            self.refusals += 1
            self.rig.end(TickOutcome.REFUSED)

    @rule()
    def refuse_moves(self) -> None:
        """Refuse a plan that moves KV, if one can be had: those are rare, and undone in many places."""
        for _ in range(3):
            plan = self.rig.engine.plan
            if plan is not None and (plan.park_out or plan.park_in):
                self.refuse()
                return
            self._step()
            self.launch()

    @rule(level=st.sampled_from(PressureLevel), draw=st.integers(0, 9))
    def pressure(self, level: PressureLevel, draw: int) -> None:
        """Rare, for it closes the host's store for a minute."""
        if draw == 0:
            self._give(Pressure(level))

    @rule(wait=st.sampled_from([1, 50, 1000, 60_000]))
    def wait(self, wait: int) -> None:
        self.rig.now_ns += wait * MS

    @rule(draw=st.integers(0, 39))
    def drain(self, draw: int) -> None:
        if draw == 0:
            self._give(Drain())

    @invariant()
    def launch(self) -> None:
        """Keep a plan in flight; where a lane stayed free, every class has a reason (S10)."""
        rig = self.rig
        if rig.engine.plan is None:
            plan = rig.launch()
            assert plan is not None or not rig.state.sessions, "idle with sessions left"
            self._judge_idle_lanes()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        while rig.engine.plan is not None:
            self._step()
        rig.run(3_000)
        assert set(rig.emitted) == set(rig.finished), "an accepted session never ended"
        assert not set(rig.rejected) & set(rig.finished)
        assert rig.scheduler.stats().blocks_used == 0
        assert rig.scheduler.stats().parked_sessions == 0
        # a short host takes its memory back, although nobody has work
        rig.give(Pressure(PressureLevel.WARNING))
        rig.run()
        assert not rig.engine.host, "tickets leaked"
        rig.expect_oracle()

    def _give(self, *inputs: Input) -> None:
        self.rig.give(*inputs)

    def _step(self, fault: LaneFault | None = None) -> None:
        rig = self.rig
        if rig.engine.plan is None:
            return
        if rig.must_stop and rig.engine.steps:
            rig.end(TickOutcome.INTERRUPTED)
        elif rig.step(fault) is None:
            rig.end()

    def _judge_idle_lanes(self) -> None:
        state = self.rig.state
        if not state.lanes.free or not state.admits:
            return
        if not state.rules.admit_after_preempt and state.preempted_tick == state.tick:
            return
        if state.lanes.busy >= state.thrash.lanes_allowed(self.rig.now_ns):
            return
        held_above = False
        for qos in QosClass:
            head = state.queues.head(qos, self.rig.now_ns, state.is_capped)
            if head is None or held_above:
                continue
            is_held = gates.is_class_full(state, qos) or gates.is_pressed(state, qos)
            fits = not is_held and state.accounts.fits(head)
            assert not fits, f"S10: {head.key} waits beside a free lane"
            held_above = head.spec.batch_invariant
