"""Bugs planted on purpose: each must be found by the random schedules, or the schedules prove nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from superfluid_core.kv.blocks import BlockPool
from superfluid_core.kv.park import ParkStore
from superfluid_core.kv.prefix import PrefixCache
from superfluid_core.scheduler import admission, growth, planner
from superfluid_core.scheduler import state as state_module
from superfluid_core.scheduler.accounts import Accounts
from superfluid_core.scheduler.lanes import Lanes
from superfluid_core.scheduler.planner import _Share
from superfluid_core.scheduler.queues import Queues
from superfluid_core.scheduler.records import Session
from superfluid_core.scheduler.state import State
from tests.unit.scheduler.machine import SchedulerMachine

Plant = Callable[[pytest.MonkeyPatch], None]
SETTINGS = settings(
    max_examples=1_000,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def a_block_is_published_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    original = Accounts.publish

    def publish(self: Accounts, session: Session) -> None:
        computed, size = session.computed, self.shape.block_tokens
        early = computed - computed % size + size
        if early <= min(len(session.context), len(session.blocks) * size):
            session.computed = early
        original(self, session)
        session.computed = computed

    patch.setattr(Accounts, "publish", publish)


def reuse_covers_the_whole_context(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Accounts,
        "reusable_max",
        lambda self, session: len(session.context) // self.shape.block_tokens,
    )


def hits_are_believed_by_place_alone(patch: pytest.MonkeyPatch) -> None:
    def find(self: PrefixCache, name: bytes, parent: bytes, tokens: tuple[int, ...]) -> int | None:
        for node in self._nodes.values():
            if node.parent == parent:
                return node.block
        return None

    patch.setattr(PrefixCache, "find", find)


def a_preempted_session_keeps_its_progress(patch: pytest.MonkeyPatch) -> None:
    original = Accounts.open

    def open_(self: Accounts, session: Session) -> None:
        kept = session.recompute_below
        original(self, session)
        session.computed = min(len(session.context) - 1, max(session.computed, kept))

    patch.setattr(Accounts, "open", open_)


def a_preempted_session_is_started_without_its_outputs(patch: pytest.MonkeyPatch) -> None:
    original = State.preempt

    def preempt(self: State, session: Session, now_ns: int) -> None:
        del session.context[len(session.spec.prompt) :]
        original(self, session, now_ns)

    patch.setattr(State, "preempt", preempt)


def blocks_leak_when_a_grant_is_trimmed(patch: pytest.MonkeyPatch) -> None:
    def trim(self: Accounts, session: Session) -> int:
        spare = session.blocks[self.blocks_for(len(session.context)) :]
        del session.blocks[len(session.blocks) - len(spare) :]
        session.table = None
        return len(spare)

    patch.setattr(Accounts, "trim", trim)


def a_promise_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounts, "available", property(lambda self: self.cache.reachable))


def nobody_is_preempted_for_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(growth, "make_room", lambda state, now_ns: None)
    patch.setattr(planner, "make_room", lambda state, now_ns: None)


def a_held_session_closes_all_classes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "_close", lambda closed, session: closed.update(type(session.qos)))


def the_taken_lane_is_not_announced(patch: pytest.MonkeyPatch) -> None:
    original = Lanes.restore_changes
    patch.setattr(Lanes, "restore_changes", lambda self, starts, frees: original(self, (), frees))


def tokens_of_the_ended_are_emitted(patch: pytest.MonkeyPatch) -> None:
    original = State._leave_lane

    def leave(self: State, session: Session, *, is_tainted: bool = False) -> None:
        flight, lane = self.flight, session.lane
        original(self, session, is_tainted=is_tainted)
        if flight is not None and lane in (each.lane for each in flight.plan.lanes):
            flight.lanes[lane] = session

    patch.setattr(State, "_leave_lane", leave)


def a_cancelled_session_stays_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Queues, "__contains__", lambda self, session: False)


def grants_ignore_the_maximum(patch: pytest.MonkeyPatch) -> None:
    original = _Share.grant

    def grant(self: _Share, rounds: int) -> int:
        granted = original(self, rounds)
        return granted and granted + 1

    patch.setattr(_Share, "grant", grant)


def an_eviction_takes_a_held_block(patch: pytest.MonkeyPatch) -> None:
    def allocate(self: PrefixCache) -> int:
        pool: BlockPool = self._pool
        if not pool.free:
            for node in list(self._nodes.values()):
                if not node.children:
                    self._forget(node)
                    if not pool.references(node.block):
                        self.idle -= 1
                    pool._references[node.block] = 0
                    pool.give_back(node.block)
                    break
        return pool.allocate()

    patch.setattr(PrefixCache, "allocate", allocate)


def a_ticket_outlives_its_session(patch: pytest.MonkeyPatch) -> None:
    def give_up(accounts: Accounts, session: Session) -> None:
        session.parked = None

    patch.setattr(state_module, "give_up", give_up)


def the_front_comes_back_where_the_tail_belongs(patch: pytest.MonkeyPatch) -> None:
    original = ParkStore.keep
    patch.setattr(ParkStore, "keep", lambda self, blocks: original(self, blocks[::-1]))


def the_host_is_never_full(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParkStore, "_make_room", lambda self, blocks: True)


def the_moves_of_a_refused_plan_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParkStore, "refuse", lambda self, wanted: self.landed())


def a_prefix_is_brought_in_twice(patch: pytest.MonkeyPatch) -> None:
    def take_prefix(self: ParkStore, name: bytes) -> int:
        ticket = self._prefixes[name].ticket
        self._leaving[ticket] = 1
        return ticket

    patch.setattr(ParkStore, "take_prefix", take_prefix)


PLANTS: list[Plant] = [
    a_block_is_published_before_it_is_full,
    reuse_covers_the_whole_context,
    hits_are_believed_by_place_alone,
    a_preempted_session_keeps_its_progress,
    a_preempted_session_is_started_without_its_outputs,
    blocks_leak_when_a_grant_is_trimmed,
    a_promise_is_not_counted,
    nobody_is_preempted_for_blocks,
    a_held_session_closes_all_classes,
    the_taken_lane_is_not_announced,
    tokens_of_the_ended_are_emitted,
    a_cancelled_session_stays_queued,
    grants_ignore_the_maximum,
    an_eviction_takes_a_held_block,
    a_ticket_outlives_its_session,
    the_front_comes_back_where_the_tail_belongs,
    the_host_is_never_full,
    the_moves_of_a_refused_plan_are_lost,
    a_prefix_is_brought_in_twice,
]


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)
