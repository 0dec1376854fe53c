"""Steps of a plan, cut by columns, are those that following every lane by itself would give."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.engine.compose import StepComposer, StepRow
from superfluid_core.scheduler.plan import LanePlan, TickPlan


@dataclass
class Lane:
    """One lane of the plain composition."""

    plan: LanePlan
    position: int
    inputs: tuple[int, ...]
    left: int
    index: int
    decoding: bool


class Plain:
    """Lane by lane, row by row, as the text of compose.py says it."""

    def __init__(self, plan: TickPlan) -> None:
        self.step_tokens = plan.step_tokens
        self.lanes = {
            each.lane: Lane(
                each, each.computed, each.inputs, each.grant, each.output_index, each.decoding
            )
            for each in plan.lanes
        }

    def rows(self) -> list[StepRow]:
        rows = [
            StepRow(n, lane.position, lane.inputs, True, lane.index, True)
            for n, lane in self.lanes.items()
            if lane.decoding and lane.left > 0
        ]
        room = self.step_tokens - len(rows)
        for n, lane in self.lanes.items():
            if lane.decoding or not lane.inputs:
                continue
            if room <= 0 and rows:
                break
            take = lane.inputs[: max(1, room)]
            samples = len(take) == len(lane.inputs) and lane.left > 0
            rows.append(StepRow(n, lane.position, take, samples, lane.index, False))
            room -= len(take)
        return rows

    def commit(self, rows: list[StepRow], drawn: dict[int, int]) -> None:
        for row in rows:
            lane = self.lanes.get(row.lane)
            if lane is None:
                continue
            lane.position += len(row.inputs)
            lane.inputs = lane.inputs[len(row.inputs) :]
            if row.samples and row.lane not in drawn:
                del self.lanes[row.lane]
            elif row.samples:
                lane.inputs = (drawn[row.lane],)
                lane.left -= 1
                lane.index += 1
                lane.decoding = True


@st.composite
def plans(draw: st.DrawFn) -> TickPlan:
    lanes = []
    for number in range(draw(st.integers(1, 6))):
        decoding = draw(st.booleans())
        inputs = tuple(range(1 if decoding else draw(st.integers(1, 9))))
        grant = draw(st.integers(0, 5))
        computed = draw(st.integers(0, 20))
        lanes.append(LanePlan(10 + number, decoding, computed, inputs, grant, number, ()))
    lanes.sort(key=lambda each: not each.decoding)
    return TickPlan(1, tuple(lanes), draw(st.integers(1, 12)))


@settings(max_examples=150, deadline=None)
@given(plans(), st.data())
def test_steps_are_those_of_every_lane_by_itself(plan: TickPlan, data: st.DataObject) -> None:
    composer, plain = StepComposer(plan), Plain(plan)
    for count in range(200):
        rows = plain.rows()
        step = composer.next_step()
        assert (step is None) == (not rows)
        if step is None:
            break
        assert step.rows() == rows
        assert len(step) == len(rows)
        assert step.sampling == [row.lane for row in rows if row.samples]
        assert step.context == sum(row.position + len(row.inputs) for row in rows)
        assert step.prompt_tokens == sum(len(row.inputs) for row in rows if not row.decoding)
        early = data.draw(st.sampled_from([None, None, *(row.lane for row in rows)]))
        if early is not None:
            composer.drop(early)
            plain.lanes.pop(early, None)
        faulty = data.draw(st.sampled_from([None, None, *(row.lane for row in rows)]))
        drawn = {
            row.lane: 100 * count + row.lane for row in rows if row.samples and row.lane != faulty
        }
        composer.commit(list(drawn), list(drawn.values()))
        plain.commit(rows, drawn)
        late = data.draw(st.sampled_from([None, None, None, *drawn]))
        if late is not None:
            composer.drop(late)
            plain.lanes.pop(late, None)
    else:
        pytest.fail("the plan is never used up")


def test_a_step_that_was_handed_out_does_not_change_with_the_next_one() -> None:
    decoding = LanePlan(0, True, 9, (5,), 3, 0, ())
    prompt = LanePlan(1, False, 0, (1, 2, 3), 2, 0, ())
    composer = StepComposer(TickPlan(1, (decoding, prompt), 8))
    first = composer.next_step()
    assert first is not None
    before = first.rows()
    composer.commit(first.sampling, [7, 8])
    second = composer.next_step()
    assert second is not None
    composer.commit(second.sampling, [9, 10])
    composer.drop(0)
    assert first.rows() == before
    assert [row.inputs for row in second.rows()] == [(7,), (8,)]
