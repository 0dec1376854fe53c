"""Classes, aging, caps, preemption by class, batch-invariant lanes, set_qos: S3 to S8, S10."""

from __future__ import annotations

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import Cancel, SetQos
from superfluid_core.scheduler.rules import QueueOrder, Rules, Victim
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import FinishReason, QosClass
from tests.unit.scheduler.rig import MS, Rig, key, oracle, spec

CHAT, COMPLETION, AGENT, BATCH = QosClass
ONE_LANE = SchedulerLimits(lanes=1, step_tokens=32)
TWO_LANES = SchedulerLimits(lanes=2, step_tokens=32)
PERIOD_MS = 16_000


def test_s3_the_best_class_goes_first_and_each_class_in_order_of_arrival() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, qos=BATCH), spec(2, qos=AGENT), spec(3, qos=CHAT), spec(4, qos=AGENT))
    rig.submit(spec(5, qos=COMPLETION), spec(6, qos=CHAT))
    rig.run()
    assert rig.order() == [3, 6, 5, 2, 4, 1]


def test_s4_a_session_rises_one_class_for_every_period_it_has_waited() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 100, qos=AGENT))
    rig.tick()
    rig.submit(spec(2, qos=BATCH))
    rig.now_ns += PERIOD_MS * MS
    rig.submit(spec(3, qos=AGENT))
    rig.give(Cancel(key(1)))
    rig.run()
    assert rig.order() == [1, 2, 3]


def test_s4_a_period_counts_nominal_ticks_however_short_the_real_ones_are() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 100, qos=AGENT))
    rig.tick()
    rig.submit(spec(2, qos=BATCH))
    rig.now_ns += (PERIOD_MS - 1) * MS
    rig.submit(spec(3, qos=AGENT))
    rig.give(Cancel(key(1)))
    rig.run()
    assert rig.order() == [1, 3, 2]


def test_s4_aging_does_not_shield_from_preemption() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 100, qos=BATCH))
    rig.tick()
    rig.now_ns += 10 * PERIOD_MS * MS
    rig.submit(spec(2, qos=CHAT))
    rig.tick()
    assert rig.order() == [1, 2]


def test_s4_an_aged_session_that_got_a_lane_keeps_it_for_one_tick() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 100, qos=AGENT))
    rig.tick()
    rig.submit(spec(2, 10, 100, qos=BATCH))
    rig.now_ns += 5 * PERIOD_MS * MS
    rig.give(Cancel(key(1)))
    rig.submit(spec(3, qos=CHAT))
    rig.tick()
    assert rig.running() == [2]
    rig.tick()
    assert rig.running() in ([3], [])
    rig.run()
    rig.expect_oracle()


def test_s5_a_class_at_its_lane_cap_lets_the_next_class_through() -> None:
    rig = Rig(SchedulerLimits(lanes=3, step_tokens=32), rules=Rules(class_lanes={AGENT: 1}))
    rig.submit(spec(1, qos=AGENT), spec(2, qos=AGENT), spec(3, qos=BATCH))
    rig.launch()
    assert rig.running() == [1, 3]
    while rig.step():
        pass
    rig.end()
    rig.run()


@pytest.mark.parametrize("lanes", [0, 9])
def test_s5_a_cap_outside_the_lanes_is_a_start_up_error(lanes: int) -> None:
    with pytest.raises(ConfigError, match="class-lanes"):
        Scheduler(SchedulerLimits(), PoolShape(16, 9, 99), rules=Rules(class_lanes={AGENT: lanes}))


def test_s6_an_urgent_session_takes_the_lane_of_the_lowest_class() -> None:
    rig = Rig(SchedulerLimits(lanes=3, step_tokens=32))
    rig.submit(spec(1, 10, 50, AGENT), spec(2, 10, 50, BATCH), spec(3, 10, 50, AGENT))
    rig.tick()
    rig.submit(spec(4, 10, 5, CHAT))
    rig.launch()
    assert rig.running() == [1, 3, 4]
    assert rig.scheduler.stats().preempted_for_class == 1
    rig.step()
    rig.end()
    rig.run()
    rig.expect_oracle()


def test_s6_the_lane_goes_to_the_session_that_caused_the_preemption() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 50, BATCH))
    rig.tick()
    rig.submit(spec(2, qos=AGENT))
    rig.now_ns += 20 * PERIOD_MS * MS  # the agent is older and has risen to the top
    rig.submit(spec(3, qos=CHAT))
    rig.tick()
    assert rig.order()[1] == 3


def test_s6_decoding_yields_before_prefilling_and_the_last_admitted_first() -> None:
    limits = SchedulerLimits(lanes=3, step_tokens=8, prefill_budget=8)
    rig = Rig(limits)
    rig.submit(spec(1, 6, 50), spec(2, 6, 50))
    for _ in range(4):
        rig.tick()
    rig.submit(spec(3, 60, 50))
    rig.tick()
    rig.submit(spec(4, 4, 3, CHAT))
    rig.launch()
    assert rig.running() == [1, 3, 4]


def test_s6_nobody_yields_to_its_own_class_or_to_an_agent() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 30, BATCH))
    rig.tick()
    rig.submit(spec(2, 10, 5, AGENT))
    rig.run()
    assert rig.scheduler.stats().preemptions == 0
    chat = Rig(ONE_LANE)
    chat.submit(spec(1, 10, 30, CHAT), spec(2, 10, 30, CHAT))
    chat.run()
    assert chat.scheduler.stats().preemptions == 0


def test_s6_a_victim_goes_to_the_head_of_its_class_and_its_stream_resumes() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 30), spec(2, 10, 4))
    rig.tick()
    rig.submit(spec(3, 10, 3, CHAT))
    rig.run()
    assert rig.order() == [1, 3, 2]
    assert list(rig.finished) == [key(3), key(1), key(2)]
    rig.expect_oracle()


def test_s6_nobody_is_preempted_when_the_lane_would_not_help() -> None:
    rig = Rig(TWO_LANES, PoolShape(4, 12, 100))
    rig.submit(spec(1, 26, 9, CHAT), spec(2, 4, 9, BATCH))
    rig.tick()
    rig.submit(spec(3, 40, 3, CHAT))
    rig.tick()
    assert rig.scheduler.stats().preemptions == 0
    rig.run()
    rig.expect_oracle()


def test_s6_batch_invariant_lanes_never_yield_to_a_class() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 9, BATCH, batch_invariant=True))
    rig.tick()
    rig.submit(spec(2, 10, 3, CHAT))
    rig.run()
    assert list(rig.finished) == [key(1), key(2)]


def test_the_victim_with_the_least_work_can_be_chosen_instead() -> None:
    rig = Rig(TWO_LANES, rules=Rules(victim=Victim.LEAST_WORK))
    rig.submit(spec(1, 6, 50), spec(2, 40, 50))
    rig.tick()
    rig.tick()
    rig.submit(spec(3, 4, 3, CHAT))
    rig.launch()
    assert rig.running() == [2, 3]


def test_s7_a_batch_invariant_lane_ticks_alone_and_the_others_take_turns_with_it() -> None:
    rig = Rig()
    rig.submit(spec(1, 10, 20, batch_invariant=True), spec(2, 10, 20), spec(3, 10, 20))
    plans = []
    while (plan := rig.tick()) is not None:
        plans.append(plan)
    alone = [plan for plan in plans if plan.batch_invariant]
    assert alone
    assert all(len(plan.lanes) == 1 for plan in alone)
    assert [plan.batch_invariant for plan in plans[:4]] == [True, False, True, False]
    rig.expect_oracle()


def test_s7_behind_a_waiting_batch_invariant_session_nobody_at_or_below_its_class_is_admitted() -> (
    None
):
    rig = Rig(SchedulerLimits(lanes=4, step_tokens=32), PoolShape(4, 16, 100))
    rig.submit(spec(1, 40, 12, CHAT))
    rig.tick()
    rig.submit(spec(2, 40, 3, AGENT, batch_invariant=True), spec(3, 4, 3, BATCH))
    rig.submit(spec(4, 4, 3, COMPLETION))
    rig.tick()
    assert 3 not in rig.order()
    assert 4 in rig.order()
    rig.run()
    assert rig.order().index(2) < rig.order().index(3)


def test_s8_a_queued_session_keeps_its_arrival_order_in_its_new_class() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1), spec(2, qos=BATCH), spec(3), spec(4))
    rig.tick()
    rig.give(SetQos(key(2), AGENT))
    rig.run()
    assert rig.order() == [1, 2, 3, 4]


def test_s8_a_running_session_is_judged_by_its_new_class_from_the_next_tick() -> None:
    rig = Rig(TWO_LANES)
    rig.submit(spec(1, 10, 50), spec(2, 10, 50))
    rig.tick()
    rig.give(SetQos(key(1), BATCH))
    rig.submit(spec(3, 10, 3, CHAT))
    rig.launch()
    assert rig.running() == [2, 3]


def test_s8_a_session_raised_to_an_urgent_class_interrupts_the_tick() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 50), spec(2, 10, 3))
    rig.tick()
    rig.launch()
    rig.give(SetQos(key(2), CHAT))
    assert rig.must_stop


def test_s10_a_held_session_is_not_passed_by_its_own_class_but_other_classes_go_on() -> None:
    rig = Rig(SchedulerLimits(lanes=4, step_tokens=32), PoolShape(4, 16, 100))
    rig.submit(spec(1, 40, 12))
    rig.tick()
    rig.submit(spec(2, 40, 3), spec(3, 4, 3), spec(4, 4, 3, BATCH))
    rig.tick()
    assert rig.order() == [1, 4]
    rig.run()
    assert rig.started == [1, 4, 2, 3]


def test_preempted_sessions_return_in_the_order_they_had() -> None:
    rig = Rig(TWO_LANES)
    rig.submit(spec(1, 10, 30), spec(2, 10, 30), spec(3, 10, 3))
    rig.tick()
    rig.submit(spec(4, 10, 12, CHAT), spec(5, 10, 4, CHAT))
    rig.run()
    assert rig.order() == [1, 2, 4, 5, 3]
    assert list(rig.finished)[-1] == key(2)
    assert rig.reason(1) is FinishReason.LENGTH
    rig.expect_oracle()


def test_a_shortest_queue_serves_short_prompts_first_and_starving_ones_before_them() -> None:
    rules = Rules(queue_order=QueueOrder.SHORTEST)
    rig = Rig(ONE_LANE, rules=rules)
    rig.submit(spec(1, 10, 3), spec(2, 40, 3), spec(3, 5, 3), spec(4, 20, 3))
    rig.run()
    assert rig.order() == [3, 1, 4, 2]
    old = Rig(ONE_LANE, rules=rules)
    old.submit(spec(1, 10, 100))
    old.tick()
    old.submit(spec(2, 60, 3))
    old.now_ns += PERIOD_MS * MS
    old.submit(spec(3, 5, 3))
    old.give(Cancel(key(1)))
    old.run()
    assert old.order() == [1, 2, 3]


def test_a_prefix_queue_serves_warm_prompts_first() -> None:
    rig = Rig(ONE_LANE, rules=Rules(queue_order=QueueOrder.PREFIX))
    rig.submit(spec(1, 40, 3))
    rig.run()
    rig.submit(spec(2, 12, 3), spec(3, spec(1, 40).prompt[:30], 3))
    rig.run()
    assert rig.order() == [1, 3, 2]


def test_a_fair_queue_lets_a_newcomer_tenant_pass_a_backlog() -> None:
    rig = Rig(ONE_LANE, rules=Rules(queue_order=QueueOrder.FAIR))
    rig.submit(*(spec(number, 10, 5, tenant="a") for number in range(1, 7)))
    rig.tick()
    rig.submit(spec(7, 10, 5, tenant="b"), spec(8, 10, 5, tenant="b"))
    rig.run()
    order = rig.order()
    assert order[0] == 1
    assert order.index(7) == 1
    assert order.index(8) <= 3
    assert [each for each in order if each < 7] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("own", "sent"),
    [((("heavy", 2),), 1), ((), 2), ((("heavy", 2),), 50)],
    ids=["the node's own", "sent with the sessions", "the node's own goes first"],
)
def test_a_tenant_of_twice_the_weight_gets_twice_the_turns(
    own: tuple[tuple[str, int], ...], sent: int
) -> None:
    rules = Rules(queue_order=QueueOrder.FAIR, tenant_weights=own)
    rig = Rig(ONE_LANE, rules=rules)
    rig.submit(*(spec(number, 10, 5, tenant="light") for number in range(1, 13)))
    rig.submit(*(spec(number, 10, 5, tenant="heavy", weight=sent) for number in range(21, 33)))
    rig.run()
    first = rig.order()[:12]
    assert sum(1 for number in first if number > 20) == 8


def test_a_tenant_at_its_lane_cap_is_passed_over_until_it_has_a_lane_less() -> None:
    rig = Rig(SchedulerLimits(lanes=3, step_tokens=32), rules=Rules(tenant_lanes=2))
    rig.submit(*(spec(number, 10, 9, tenant="a") for number in range(1, 5)))
    rig.submit(spec(5, 10, 9, tenant="b"))
    rig.launch()
    assert rig.running() == [1, 2, 5]
    while rig.step():
        pass
    rig.end()
    rig.run()
    assert rig.order()[3:] == [3, 4]


def test_a_cancel_in_the_middle_of_thousands_leaves_no_trace() -> None:
    rig = Rig(SchedulerLimits(lanes=1, step_tokens=32, queue_max=500))
    rig.scheduler.receive([], rig.now_ns)
    rig.submit(*(spec(number, 5, 2) for number in range(300)))
    rig.give(*(Cancel(key(number)) for number in range(1, 299)))
    rig.run()
    assert rig.order() == [0, 299]
    assert rig.output(299) == oracle(spec(299, 5, 2), rig.shape)[0]


# --- sessions that another node began -----------------------------------------------------------------


def test_a_session_that_another_node_began_goes_before_the_newcomers_of_its_class() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 100))
    rig.tick()
    rig.submit(spec(2), spec(3, delivered=(1, 2)), spec(4, qos=CHAT), spec(5, delivered=(3,)))
    rig.run()
    # a better class is still first, and who gave way for it comes back before all; of two that moved the first one is first
    assert list(dict.fromkeys(rig.order())) == [1, 4, 3, 5, 2]
    rig.expect_oracle()


def test_a_preempted_session_comes_back_before_one_that_another_node_began() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 30))
    rig.tick()
    rig.submit(spec(2, delivered=(1, 2)), spec(3, 10, 200, qos=CHAT))
    rig.tick()
    rig.give(Cancel(key(3)))
    rig.tick()
    assert 2 not in rig.order()
    rig.run()
    assert rig.order() == [1, 3, 2]
    rig.expect_oracle()


def test_newcomers_that_starve_take_turns_with_sessions_that_other_nodes_began() -> None:
    rig = Rig(ONE_LANE)
    rig.submit(spec(1, 10, 100))
    rig.tick()
    rig.submit(spec(2), spec(3))
    rig.now_ns += PERIOD_MS * MS
    rig.submit(*(spec(number, delivered=(1, 2)) for number in (4, 5, 6)))
    rig.give(Cancel(key(1)))
    rig.run()
    assert rig.order() == [1, 4, 2, 5, 3, 6]


def test_a_session_that_another_node_began_is_bound_by_its_tenants_cap() -> None:
    rig = Rig(TWO_LANES, rules=Rules(tenant_lanes=1))
    rig.submit(spec(1, 10, 50, tenant="a"), spec(2, 10, 50, tenant="c"))
    rig.tick()
    rig.submit(spec(3, tenant="b"), spec(4, delivered=(1, 2), tenant="a"))
    rig.give(Cancel(key(2)))
    rig.tick()
    assert rig.running() == [1, 3]
    rig.run()
    assert rig.order() == [1, 2, 3, 4]


@pytest.mark.parametrize("order", list(QueueOrder))
def test_whatever_the_order_in_a_class_who_is_in_mid_sentence_is_first(order: QueueOrder) -> None:
    rig = Rig(ONE_LANE, rules=Rules(queue_order=order))
    rig.submit(spec(1, 10, 100, tenant="a"))
    rig.tick()
    rig.submit(spec(2, 5, tenant="b"), spec(3, 40, 9, delivered=(1, 2), tenant="a"))
    rig.give(Cancel(key(1)))
    rig.run()
    assert rig.order() == [1, 3, 2]
