"""A scheduler, a tiny engine that keeps a real (token) KV per block, and the laws that both must keep.

The engine's next token is a hash of the context *as read back from the blocks that the plan names*: a block that was shared
wrongly, overwritten or freed too early gives a wrong token, and the oracle notices.
"""

from __future__ import annotations

from zlib import crc32

from superfluid_core.engine.compose import StepComposer
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.foresight import Foreseen
from superfluid_core.scheduler.plan import (
    Accepted,
    Effect,
    Emit,
    Emits,
    Finish,
    Input,
    Interrupt,
    LaneFault,
    LaneStart,
    Progress,
    Reject,
    StepDone,
    Submit,
    TickDone,
    TickOutcome,
    TickPlan,
)
from superfluid_core.scheduler.rules import Rules
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import (
    FinishReason,
    QosClass,
    SamplingParams,
    SessionKey,
    SessionSpec,
)

MS = 1_000_000
VOCABULARY = 50


def spec(
    number: int,
    prompt: int | tuple[int, ...] = 10,
    max_output: int = 5,
    qos: QosClass = QosClass.AGENT,
    **more: object,
) -> SessionSpec:
    """A session; a prompt given as a length is filled with tokens of its own."""
    if isinstance(prompt, int):
        prompt = tuple((number * 31 + place * 7) % VOCABULARY for place in range(prompt))
    return SessionSpec(
        key=key(number),
        model="m",
        prompt=prompt,
        max_output=max_output,
        qos=qos,
        **more,  # type: ignore[arg-type]
    )


def key(number: int) -> SessionKey:
    return SessionKey("head", number)


def token_after(context: list[int], seed: int) -> int:
    return crc32(repr((context, seed)).encode()) % VOCABULARY


def oracle(of: SessionSpec, shape: PoolShape) -> tuple[list[int], FinishReason]:
    """All outputs of the uninterrupted session, and how it ends."""
    outputs = list(of.delivered)
    if outputs and outputs[-1] in of.stop_ids and len(outputs) > of.min_output:
        return outputs, FinishReason.STOP
    while True:
        context = [*of.prompt, *outputs]
        if len(outputs) >= of.max_output or len(context) >= shape.context_max:
            return outputs, FinishReason.LENGTH
        token = token_after(context, of.sampling.seed)
        outputs.append(token)
        if token in of.stop_ids and len(outputs) > of.min_output:
            return outputs, FinishReason.STOP


class FakeEngine:
    """Runs plans step by step; remembers which token every place of every block holds."""

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        self.kv: dict[tuple[int, int], int] = {}
        # by ticket, per block the tokens of its places
        self.host: dict[int, list[list[int | None]]] = {}
        self.host_blocks_max = 0
        self.has_moved = True
        self.rows: dict[int, LaneStart] = {}
        self.outputs: dict[int, int] = {}
        self.plan: TickPlan | None = None
        self.composer: StepComposer | None = None
        self.steps = 0
        self.prefilled_tokens = 0

    def launch(self, plan: TickPlan) -> None:
        assert self.plan is None
        self.plan = plan
        self.composer = None
        self.steps = 0
        self.has_moved = False
        assert len({lane.lane for lane in plan.lanes}) == len(plan.lanes)

    def move(self) -> None:
        """Drops, outs and ins, once, in this order."""
        plan = self.plan
        assert plan is not None
        if self.has_moved:
            return
        self.has_moved = True
        places = range(self.shape.block_tokens)
        for ticket in plan.park_drop:
            del self.host[ticket]
        for out in plan.park_out:
            assert out.ticket not in self.host, "a ticket twice"
            self.host[out.ticket] = [
                [self.kv.get((block, place)) for place in places] for block in out.blocks
            ]
            assert sum(map(len, self.host.values())) <= self.host_blocks_max, "too much in the host"
        for back in plan.park_in:
            kept = self.host.pop(back.ticket)
            for block, tokens in zip(back.blocks, kept[: len(back.blocks)], strict=True):
                for place, token in enumerate(tokens):
                    self.kv.pop((block, place), None)
                    if token is not None:
                        self.kv[block, place] = token

    def begin(self) -> StepComposer:
        """Moves, frees and starts, once, before the first step."""
        assert self.plan is not None
        self.move()
        if self.composer is None:
            for lane in self.plan.frees:
                self.rows.pop(lane, None)
            for start in self.plan.starts:
                self.rows[start.lane] = start
                self.outputs[start.lane] = len(start.outputs)
            self.composer = StepComposer(self.plan)
        return self.composer

    def step(self, fault: LaneFault | None = None) -> StepDone | None:
        """One forward pass, or None when the plan is used up."""
        plan = self.plan
        assert plan is not None
        composer = self.begin()
        step = composer.next_step()
        if step is None:
            return None
        plans = {lane.lane: lane for lane in plan.lanes}
        sampled: dict[int, int] = {}
        prefilled: list[tuple[int, int]] = []
        tokens = 0
        for row in step.rows():
            lane = plans[row.lane]
            start = self.rows[row.lane]
            for offset, token in enumerate(row.inputs):
                self._write(lane.blocks, row.position + offset, token)
            tokens += len(row.inputs)
            if not row.decoding:
                prefilled.append((row.lane, len(row.inputs)))
                self.prefilled_tokens += len(row.inputs)
            if row.samples and not (fault and fault.lane == row.lane):
                end = row.position + len(row.inputs)
                context = [self._read(lane.blocks, place) for place in range(end)]
                prompt = start.spec.prompt
                assert tuple(context[: len(prompt)]) == prompt, "the lane runs another session"
                assert row.output_index == end - len(prompt)
                assert self.outputs[row.lane] == row.output_index, "the row was not started"
                self.outputs[row.lane] += 1
                sampled[row.lane] = token_after(context, start.spec.sampling.seed)
        composer.commit(list(sampled), list(sampled.values()))
        for number, token in sampled.items():
            if token in self.rows[number].spec.stop_ids:
                composer.drop(number)
        self.steps += 1
        return StepDone(
            plan.tick,
            self.steps,
            list(sampled),
            list(sampled.values()),
            prefilled,
            tokens,
            10 * MS + tokens * MS // 10,
            faults=() if fault is None else (fault,),
        )

    def _write(self, blocks: tuple[int, ...], position: int, token: int) -> None:
        size = self.shape.block_tokens
        self.kv[blocks[position // size], position % size] = token

    def _read(self, blocks: tuple[int, ...], position: int) -> int:
        size = self.shape.block_tokens
        return self.kv[blocks[position // size], position % size]


class Rig:
    """Joins both and checks every effect against the laws and the oracle."""

    def __init__(
        self,
        limits: SchedulerLimits | None = None,
        shape: PoolShape | None = None,
        rules: Rules | None = None,
        foresees: bool = False,
        **more: object,
    ) -> None:
        self.shape = shape or PoolShape(block_tokens=4, blocks=64, window=200)
        self.scheduler = Scheduler(
            limits or SchedulerLimits(lanes=4, step_tokens=32),
            self.shape,
            rules=rules,
            **more,  # type: ignore[arg-type]
        )
        self.state = self.scheduler._state
        self.engine = FakeEngine(self.shape)
        self.engine.host_blocks_max = self.state.accounts.park.blocks_max
        self.now_ns = 1_000 * MS
        self.specs: dict[SessionKey, SessionSpec] = {}
        self.emitted: dict[SessionKey, list[int]] = {}
        self.finished: dict[SessionKey, Finish] = {}
        self.rejected: dict[SessionKey, Reject] = {}
        self.log: list[Effect | Emit] = []
        self.must_stop = False
        self.started: list[int] = []
        self.foresees = foresees
        self.foreseen: Foreseen | None = None
        # what the engine has posted and the scheduler has not heard, and the tick that the loop believes in flight
        self.unheard: list[Input] = []
        self.in_flight: int | None = None
        self.followed = 0

    # --- driving ----------------------------------------------------------------------------------

    def give(self, *inputs: Input) -> list[Effect]:
        for each in inputs:
            if isinstance(each, Submit) and each.spec.key not in self.specs:
                self.specs[each.spec.key] = each.spec
            if isinstance(each, TickDone):
                self.foreseen = None
                self.in_flight = each.tick + 1 if each.is_followed else None
        effects = self.scheduler.receive(inputs, self.now_ns)
        for effect in effects:
            for row in effect if isinstance(effect, Emits) else (effect,):
                self._judge(row)
        check(self)
        return effects

    def submit(self, *specs: SessionSpec) -> list[Effect]:
        return self.give(*(Submit(each) for each in specs))

    def launch(self) -> TickPlan | None:
        plan = self.scheduler.plan(self.now_ns)
        check(self)
        if plan is not None:
            self.must_stop = False
            self.in_flight = plan.tick
            self.engine.launch(plan)
            self.started.extend(start.spec.key.session for start in plan.starts)
            check_plan(self, plan)
            self._foresee()
        return plan

    def step(self, fault: LaneFault | None = None) -> list[Effect] | None:
        plan = self.engine.plan
        assert plan is not None
        if plan.tick % 2:
            self.hear()
        done = self.engine.step(fault)
        if done is None:
            return None
        self.now_ns += done.elapsed_ns
        self.unheard.append(done)
        if self._follow(done):
            return []
        effects = self.hear()
        self._foresee()
        return effects

    def _foresee(self) -> None:
        if self.foresees and self.foreseen is None:
            self.foreseen = self.scheduler.foresee()
            check(self)

    def hear(self) -> list[Effect]:
        """Tell the scheduler what the engine has posted."""
        posted, self.unheard = self.unheard, []
        return self.give(*posted) if posted else []

    def _follow(self, done: StepDone) -> bool:
        """Have the engine go on with what was foreseen, before the scheduler hears of the tick's end: in between anything may come."""
        engine, foreseen = self.engine, self.foreseen
        if foreseen is None or self.must_stop or engine.begin().next_step() is not None:
            return False
        self.foreseen = None
        plan = foreseen.complete(done)
        if plan is None:
            return False
        self.followed += 1
        self.unheard.append(TickDone(done.tick, TickOutcome.COMPLETE, engine.steps, 0, True))
        engine.plan = None
        engine.launch(plan)
        check_plan(self, plan)
        return True

    def end(self, outcome: TickOutcome = TickOutcome.COMPLETE) -> list[Effect]:
        self.hear()
        plan = self.engine.plan
        assert plan is not None
        if outcome is not TickOutcome.REFUSED:
            self.engine.move()
        self.engine.plan = None
        return self.give(TickDone(plan.tick, outcome, self.engine.steps, 0))

    def tick(self) -> TickPlan | None:
        """One whole tick, stopped early where the scheduler asks for it."""
        plan = self.launch()
        if plan is None:
            return None
        while self.step() is not None:
            if self.must_stop:
                self.end(TickOutcome.INTERRUPTED)
                return plan
        self.end()
        return plan

    def run(self, ticks_max: int = 10_000) -> int:
        """Tick until nothing is left; returns how many ticks that took."""
        for count in range(ticks_max):
            if self.tick() is None:
                assert not self.state.sessions, "sessions are left and nothing is planned"
                return count
        raise AssertionError(f"not idle after {ticks_max} ticks")

    # --- what happened ----------------------------------------------------------------------------

    def output(self, number: int) -> list[int]:
        return self.emitted.get(key(number), [])

    def reason(self, number: int) -> FinishReason:
        return self.finished[key(number)].reason

    def running(self) -> list[int]:
        return sorted(each.key.session for each in self.state.lanes)

    def order(self) -> list[int]:
        """Sessions in the order of their first token."""
        seen: dict[int, None] = {}
        for effect in self.log:
            if isinstance(effect, Emit):
                seen[effect.key.session] = None
        return list(seen)

    def expect_oracle(self) -> None:
        """Every session that ended by itself said what an uninterrupted one says."""
        for name, finish in self.finished.items():
            if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                of = self.specs[name]
                outputs, reason = oracle(of, self.shape)
                assert [*of.delivered, *self.emitted.get(name, [])] == outputs
                assert finish.reason is reason

    def _judge(self, effect: Effect | Emit) -> None:
        assert not isinstance(effect, Emits), "columns are judged row by row"
        self.log.append(effect)
        if isinstance(effect, Interrupt):
            assert self.engine.plan is not None
            assert effect.tick in (self.engine.plan.tick, self.engine.plan.tick - self.foresees)
            self.must_stop = self.must_stop or effect.tick == self.in_flight
            return
        assert effect.key not in self.finished, f"{effect} after the end"
        match effect:
            case Accepted():
                assert effect.key not in self.emitted
                self.emitted[effect.key] = []
            case Reject():
                if effect.key not in self.emitted:
                    self.rejected[effect.key] = effect
            case Progress():
                assert 0 <= effect.cached <= effect.done <= effect.total
            case Emit():
                of = self.specs[effect.key]
                said = self.emitted[effect.key]
                assert effect.index == len(of.delivered) + len(said), "a token twice or a gap"
                context = [*of.prompt, *of.delivered, *said]
                assert effect.token == token_after(context, of.sampling.seed), "a wrong token"
                said.append(effect.token)
            case Finish():
                assert effect.key in self.emitted, "an end without a beginning"
                self.finished[effect.key] = effect


def check_plan(rig: Rig, plan: TickPlan) -> None:
    """What plan.py promises to an engine."""
    size = rig.shape.block_tokens
    written: dict[int, int] = {}
    seen_prefill = False
    for lane in plan.lanes:
        assert lane.decoding is False or (len(lane.inputs) == 1 and not seen_prefill)
        seen_prefill = seen_prefill or not lane.decoding
        last = lane.computed + len(lane.inputs) + max(0, lane.grant - 1)
        assert lane.inputs
        assert len(lane.blocks) * size >= last, "a position without a block"
        assert last <= rig.shape.window
        for place in range(lane.computed // size, -(-last // size)):
            block = lane.blocks[place]
            assert written.setdefault(block, lane.lane) == lane.lane, "two lanes write one block"
            assert rig.state.accounts.pool.references(block) == 1, "a shared block is written"
    if plan.batch_invariant:
        assert len(plan.lanes) == 1


def check(rig: Rig) -> None:
    """The invariants, from scratch: S1, S9, S10, reference counts."""
    state = rig.state
    accounts, lanes, queues = state.accounts, state.lanes, state.queues
    active = list(lanes)
    queued = list(queues)
    everyone = [each.seq for each in (*active, *queued)]
    assert len(everyone) == len(set(everyone)), "S1: in two places"
    assert sorted(everyone) == sorted(each.seq for each in state.sessions.values()), "S1: nowhere"
    assert len(active) + lanes.free == lanes.total
    for lane, session in (*lanes.prefilling.items(), *lanes.decoding.items()):
        assert session.lane == lane
        if lane in lanes.decoding:
            assert session.computed == len(session.context) - 1
        else:
            assert session.computed < len(session.context)
    assert accounts.reserved == sum(each.reserved for each in active), "S9"
    assert all(each.reserved >= 0 for each in active)
    assert not any(each.reserved or each.blocks for each in queued), "S9: a waiting one holds"
    assert accounts.outstanding == sum(
        max(0, each.reserved - len(each.blocks)) for each in active
    ), "S9: promised"
    assert 0 <= accounts.outstanding <= accounts.cache.reachable, "S9: promises exceed the pool"
    held: dict[int, int] = {}
    for session in active:
        for block in session.blocks:
            held[block] = held.get(block, 0) + 1
    pool = accounts.pool
    for block in range(pool.total):
        assert pool.references(block) == held.get(block, 0), "reference counts do not balance"
    assert pool.free + accounts.cache.idle + len(held) == pool.total, "blocks leaked"
    check_park(rig)
    assert queues.tokens == sum(len(each.context) for each in queued)
    for qos in QosClass:
        assert queues.depth(qos) == sum(1 for each in queued if each.qos is qos)
        assert lanes.of_class(qos) == sum(1 for each in active if each.qos is qos)


def check_park(rig: Rig) -> None:
    """No ticket leaks, no byte too many, and the engine's host holds what the accounts say."""
    state = rig.state
    park = state.accounts.park
    parked = {each.parked.ticket for each in state.queues if each.parked is not None}
    assert parked == set(park._sessions), "a ticket without its session, or the other way"
    assert not any(each.parked for each in state.lanes), "an active session is parked"
    prefixes = {each.ticket for each in park._prefixes.values()}
    assert park.blocks == sum(park._sessions.values()) + len(prefixes) + sum(park._leaving.values())
    assert 0 <= park.blocks <= park.blocks_max, "the host's memory is overbooked"
    coming = set(park._ins) | {ticket for ticket, _ in park._flight.ins}
    assert set(park._leaving) == coming, "a ticket left and never comes in"
    for session in state.lanes:
        assert set(session.imports) <= coming
    if state.flight is None:
        expected = parked | prefixes | set(park._ins)
        assert set(rig.engine.host) == (expected - set(park._outs)) | set(park._drops)
        assert set(park._outs) <= expected, "what nobody wants is moved out"


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed)
