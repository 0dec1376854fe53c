"""The failover state machine of one choice: rules one by one, then random histories against an oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.clock import SECOND
from superfluid_core.errors import ErrorCode
from superfluid_core.limits import FleetLimits
from superfluid_core.session import FinishReason, SamplingParams
from superfluid_core.wire.messages import CloseReason
from superfluid_head.fleet import transitions as t
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.fleet.generation import DRAINS_MAX, GenerationMachine, Phase

LIMITS = FleetLimits()
VOCABULARY = 1_000
EOS = 2


def make_request(**changes: Any) -> GenerationRequest:
    request = GenerationRequest("r", "m", (1, 5, 9), SamplingParams(seed=7), max_output=6)
    return replace(request, **changes)


def placed(node: Any = "a", link: Any = 1, max_output: Any = 6, boot: Any = None) -> t.Placed:
    return t.Placed(
        node, boot or f"boot-{node}-{link}", link, "w", VOCABULARY, frozenset((EOS,)), max_output
    )


def kinds(actions: Any) -> list[str]:
    return [type(action).__name__ for action in actions]


def begun(request: Any = None, **where: Any) -> Any:
    machine = GenerationMachine(request or make_request(), LIMITS)
    assert kinds(machine.begin()) == ["Place"]
    assert kinds(machine.on_event(placed(**where), 0)) == ["SendOpen"]
    return machine


def taken(machine: Any) -> Any:
    """The node has said OPENED: from here on its process may die of the request."""
    at = machine.placement
    assert machine.on_event(t.Acknowledged(at.link, machine.journal.epoch, 0), 0) == []
    return machine


def row(machine: Any, *ids: Any, **changes: Any) -> t.Arrived:
    at = machine.placement
    arrived = t.Arrived(at.link, machine.journal.epoch, len(machine.journal.ids), ids)
    return replace(arrived, **changes)


def test_tokens_are_delivered_and_the_finish_ends_it() -> None:
    machine = begun()
    assert machine.on_event(row(machine, 10, 11), 0) == [t.Deliver(0, (10, 11), ())]
    last = machine.on_event(row(machine, EOS, finish=FinishReason.STOP, stop_id=EOS), 0)
    assert kinds(last) == ["Deliver", "Leave", "End"]
    assert last[-1] == t.End(FinishReason.STOP, EOS)
    assert machine.phase is Phase.ENDED


def test_the_end_comes_from_the_journal_when_the_node_does_not_say_so() -> None:
    machine = begun()
    actions = machine.on_event(row(machine, 10, 11, 12, 13, 14, 15), 0)
    assert actions[-1] == t.End(FinishReason.LENGTH)
    machine = begun()
    assert machine.on_event(row(machine, EOS), 0)[-1] == t.End(FinishReason.STOP, EOS)


def test_a_stop_id_below_the_minimum_does_not_end_it() -> None:
    machine = begun(make_request(min_output=3))
    assert kinds(machine.on_event(row(machine, EOS, EOS, EOS), 0)) == ["Deliver"]
    assert machine.on_event(row(machine, EOS), 0)[-1] == t.End(FinishReason.STOP, EOS)


def test_rows_of_another_link_or_epoch_are_dropped_and_counted() -> None:
    machine = begun()
    assert machine.on_event(row(machine, 10, link=2), 0) == []
    assert machine.on_event(row(machine, 10, epoch=0), 0) == []
    assert machine.on_event(row(machine, 10, epoch=9), 0) == []
    assert machine.stale_rows == 3
    assert machine.journal.ids == []


@pytest.mark.parametrize(
    "changes",
    [
        {"first": 1},
        {"first": 0, "ids": (10,) * 7},
        {"ids": (VOCABULARY,)},
        {"ids": (-1,)},
        {"ids": (EOS, 11)},
        {"ids": (10,), "finish": FinishReason.ERROR},
    ],
    ids=["gap", "too many", "vocabulary", "negative", "after stop", "finish"],
)
def test_a_row_that_cannot_be_right_is_a_fault_of_the_node_and_moves(changes: Any) -> None:
    machine = begun()
    actions = machine.on_event(row(machine, 10, **changes), 0)
    assert kinds(actions) == ["Blame", "Leave", "Announce", "Place"]
    assert actions[1].is_told
    assert actions[3].avoid == frozenset("a")
    assert machine.journal.ids == []


def test_an_overlap_on_the_current_epoch_is_a_fault_too() -> None:
    machine = begun()
    machine.on_event(row(machine, 10, 11), 0)
    assert kinds(machine.on_event(row(machine, 11, first=1), 0))[0] == "Blame"
    assert machine.journal.ids == [10, 11]


def test_a_move_raises_the_epoch_first_so_the_old_node_is_stale() -> None:
    machine = begun()
    late = row(machine, 10)
    actions = machine.on_event(t.NodeLost(1, t.Loss.SILENT), 0)
    assert kinds(actions) == ["Leave", "Announce", "Place"]
    assert machine.journal.epoch == 2
    assert machine.on_event(late, 0) == []
    machine.on_event(placed("b", 2), 0)
    assert machine.on_event(late, 0) == []
    assert machine.stale_rows == 2
    assert machine.on_event(row(machine, 10), 0) == [t.Deliver(0, (10,), ())]


def test_a_session_that_returns_to_the_same_link_drops_its_older_epoch() -> None:
    machine = begun()
    late = row(machine, 10)
    machine.on_event(t.Stalled(1, 1), 0)
    machine.on_event(placed("a", 1), 0)
    assert machine.on_event(late, 0) == []
    assert machine.on_event(row(machine, 10), 0) == [t.Deliver(0, (10,), ())]


def test_three_moves_then_it_fails() -> None:
    machine = begun()
    for link in (1, 2, 3):
        actions = machine.on_event(t.NodeLost(link, t.Loss.HUNG), 0)
        assert kinds(actions)[-1] == "Place"
        machine.on_event(placed("b", link + 1), 0)
    actions = machine.on_event(t.NodeLost(4, t.Loss.HUNG), 0)
    assert kinds(actions) == ["Leave", "Fail"]
    assert actions[-1].code is ErrorCode.MOVES_EXHAUSTED


def test_a_draining_node_hands_over_without_using_up_the_moves() -> None:
    machine = begun()
    for link in range(1, DRAINS_MAX + 1):
        closed = t.ClosedByNode(link, machine.journal.epoch, CloseReason.DRAIN)
        assert kinds(machine.on_event(closed, 0))[-1] == "Place"
        machine.on_event(placed("n", link + 1), 0)
    assert machine.journal.failures == 0
    assert machine.journal.moves == DRAINS_MAX


def test_a_planned_move_hears_the_old_node_until_it_happens_and_goes_to_the_warmed_one() -> None:
    machine = begun()
    machine.on_event(row(machine, 10), 0)
    assert machine.on_event(t.Relieved(2, 1, "b"), 0) == []
    assert machine.on_event(t.Relieved(1, 0, "b"), 0) == []
    assert machine.on_event(row(machine, 11), 0) == [t.Deliver(1, (11,), ())]
    late = row(machine, 12)
    actions = machine.on_event(t.Relieved(1, 1, "b"), 0)
    assert kinds(actions) == ["Leave", "Announce", "Place"]
    assert actions[0].is_told
    assert (actions[2].target, actions[2].avoid) == ("b", frozenset("a"))
    assert machine.on_event(late, 0) == []
    machine.on_event(placed("b", 2), 0)
    assert machine.on_event(late, 0) == []
    assert machine.on_event(row(machine, 12), 0) == [t.Deliver(2, (12,), ())]
    assert machine.journal.failures == 0


def test_two_dead_processes_quarantine_the_request() -> None:
    machine = taken(begun())
    machine.on_event(t.NodeLost(1, t.Loss.CUT), 0)
    machine.on_event(t.BootVerdict("boot-a-1", is_lost=True), 0)
    machine.on_event(placed("b", 2), 0)
    taken(machine)
    actions = machine.on_event(t.NodeLost(2, t.Loss.CUT), 0)
    assert kinds(actions) == ["Leave", "Announce"]
    assert machine.phase is Phase.JUDGING
    actions = machine.on_event(t.BootVerdict("boot-b-2", is_lost=True), 0)
    assert kinds(actions) == ["Quarantine", "Fail"]
    assert actions[-1].code is ErrorCode.REQUEST_QUARANTINED


def test_a_cut_link_whose_process_lives_is_no_poison() -> None:
    machine = taken(begun())
    machine.on_event(t.NodeLost(1, t.Loss.CUT), 0)
    machine.on_event(placed("b", 2), 0)
    taken(machine)
    machine.on_event(t.NodeLost(2, t.Loss.CUT), 0)
    assert machine.phase is Phase.JUDGING
    assert kinds(machine.on_event(t.BootVerdict("boot-b-2", is_lost=False), 0)) == ["Place"]
    machine.on_event(t.BootVerdict("boot-a-1", is_lost=False), 0)
    machine.on_event(placed("a", 3, boot="boot-a-1"), 0)
    taken(machine)
    assert kinds(machine.on_event(t.NodeLost(3, t.Loss.CUT), 0))[-1] == "Place"


def test_processes_that_nobody_hears_of_again_count_as_dead_after_a_while() -> None:
    machine = taken(begun())
    machine.on_event(t.NodeLost(1, t.Loss.CUT), 0)
    machine.on_event(placed("b", 2), 0)
    taken(machine)
    machine.on_event(t.NodeLost(2, t.Loss.CUT), 0)
    assert machine.on_event(t.Tick(), SECOND) == []
    assert kinds(machine.on_event(t.Tick(), 3 * SECOND)) == ["Quarantine", "Fail"]


def test_a_process_that_died_before_it_took_the_request_did_not_die_of_it() -> None:
    """Found by chaos C9: all nodes were killed at once, and what was moved onto a dead one was quarantined."""
    machine = taken(begun())
    machine.on_event(t.NodeLost(1, t.Loss.CUT), 0)
    machine.on_event(t.BootVerdict("boot-a-1", is_lost=True), 0)
    machine.on_event(placed("b", 2), 0)
    assert kinds(machine.on_event(t.NodeLost(2, t.Loss.CUT), 0))[-1] == "Place"
    assert machine.on_event(t.BootVerdict("boot-b-2", is_lost=True), 0) == []
    machine.on_event(placed("c", 3), 0)
    taken(machine)
    machine.on_event(t.NodeLost(3, t.Loss.CUT), 0)
    actions = machine.on_event(t.BootVerdict("boot-c-3", is_lost=True), 0)
    assert kinds(actions) == ["Quarantine", "Fail"]


def test_silence_and_hangs_are_no_poison() -> None:
    machine = begun()
    for link in (1, 2, 3):
        assert kinds(machine.on_event(t.NodeLost(link, t.Loss.SILENT), 0))[-1] == "Place"
        machine.on_event(placed("b", link + 1), 0)


def test_a_stamp_that_aged_while_the_head_slept_costs_no_move() -> None:
    """Found by chaos C13: after a pause of the head every node refused its first OPENs, and three moves were gone."""
    machine = begun()
    for epoch in range(1, 9):
        refused = t.RefusedByNode(epoch, epoch, ErrorCode.FENCED)
        assert kinds(machine.on_event(refused, 0)) == ["Postpone", "Leave", "Place"]
        machine.on_event(placed("b", epoch + 1), 0)
    assert (machine.journal.failures, machine.journal.moves) == (0, 0)
    last = machine.on_event(t.RefusedByNode(9, 9, ErrorCode.FENCED), 0)
    assert kinds(last) == ["Leave", "Announce", "Place"]


def test_a_busy_answer_is_soft() -> None:
    machine = begun()
    refused = t.RefusedByNode(1, 1, ErrorCode.QUEUE_FULL, retry_after_ms=200)
    actions = machine.on_event(refused, 0)
    assert kinds(actions) == ["Postpone", "Leave", "Place"]
    assert not actions[-1].is_move
    assert (machine.journal.failures, machine.journal.moves, machine.journal.epoch) == (0, 0, 2)


@pytest.mark.parametrize(
    "code", [ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.INVALID_GRAMMAR, ErrorCode.UNSUPPORTED]
)
def test_a_refusal_that_no_node_would_change_fails_the_request(code: Any) -> None:
    machine = begun()
    actions = machine.on_event(t.RefusedByNode(1, 1, code, "no"), 0)
    assert actions[-1] == t.Fail(code, "no")


def test_a_grammar_that_rejects_what_was_delivered_fails_and_never_restarts() -> None:
    machine = begun()
    machine.on_event(row(machine, 10), 0)
    closed = t.ClosedByNode(1, 1, CloseReason.ERROR, ErrorCode.GRAMMAR_REPLAY)
    assert machine.on_event(closed, 0)[-1].code is ErrorCode.GRAMMAR_REPLAY


def test_a_lane_fault_moves_without_blame_and_an_engine_fault_with_it() -> None:
    machine = begun()
    closed = t.ClosedByNode(1, 1, CloseReason.ERROR, ErrorCode.NAN_LOGITS)
    assert kinds(machine.on_event(closed, 0)) == ["Leave", "Announce", "Place"]
    machine = begun()
    closed = t.ClosedByNode(1, 1, CloseReason.ERROR, ErrorCode.INTERNAL)
    assert kinds(machine.on_event(closed, 0))[0] == "Blame"


def test_a_move_that_fits_no_window_ends_with_length() -> None:
    machine = begun()
    machine.on_event(row(machine, 10), 0)
    machine.on_event(t.NodeLost(1, t.Loss.SILENT), 0)
    assert machine.on_event(t.TooNarrow(), 0) == [t.End(FinishReason.LENGTH)]


def test_a_smaller_window_ends_with_length_when_it_is_full() -> None:
    machine = begun()
    machine.on_event(row(machine, 10), 0)
    machine.on_event(t.NodeLost(1, t.Loss.SILENT), 0)
    assert machine.on_event(placed("b", 2, max_output=3), 0) == [t.SendOpen(2, 3)]
    assert machine.on_event(row(machine, 11, 12), 0)[-1] == t.End(FinishReason.LENGTH)


def test_a_stop_string_ends_the_output_at_its_count() -> None:
    machine = begun()
    machine.on_event(row(machine, 10, 11, 12), 0)
    late = row(machine, 13)
    actions = machine.on_event(t.StopAt(2), 0)
    assert kinds(actions) == ["Leave", "End"]
    assert actions[0].is_told
    assert machine.journal.ids == [10, 11]
    assert machine.on_event(late, 0) == []
    assert machine.stale_rows == 1


def test_a_client_that_leaves_cancels_and_a_waiting_one_just_ends() -> None:
    machine = begun()
    actions = machine.on_event(t.ClientGone(), 0)
    assert kinds(actions) == ["Leave", "End"]
    waiting = GenerationMachine(make_request(), LIMITS)
    waiting.begin()
    assert kinds(waiting.on_event(t.ClientGone(), 0)) == ["End"]


def test_the_deadline_ends_it_wherever_it_is() -> None:
    machine = begun(make_request(deadline_ns=SECOND))
    assert machine.on_event(t.Tick(), SECOND - 1) == []
    actions = machine.on_event(t.Tick(), SECOND)
    assert kinds(actions) == ["Leave", "Fail"]
    assert actions[-1].code is ErrorCode.DEADLINE_EXCEEDED


def test_nothing_is_placed_for_an_output_of_nothing() -> None:
    machine = GenerationMachine(make_request(max_output=0), LIMITS)
    assert machine.begin() == [t.End(FinishReason.LENGTH)]


def test_cached_tokens_are_those_of_the_first_placement() -> None:
    machine = begun()
    machine.on_event(t.Acknowledged(1, 1, 1), 0)
    machine.on_event(t.Advanced(1, 1, 3, 3, 2), 0)
    machine.on_event(t.NodeLost(1, t.Loss.SILENT), 0)
    machine.on_event(placed("b", 2), 0)
    machine.on_event(t.Acknowledged(2, 2, 3), 0)
    assert machine.journal.cached == 2


# --- random histories ------------------------------------------------------------------------------


class World:
    """Plays nodes that all tell the oracle's tokens, and every fault that may come between."""

    def __init__(self, oracle: tuple[int, ...], max_output: int) -> None:
        self.oracle = oracle
        self.machine = GenerationMachine(make_request(max_output=max_output), LIMITS)
        self.max_output = max_output
        self.delivered: list[int] = []
        self.ends: list[t.End | t.Fail] = []
        self.links = 0
        self.now = 0
        self.wants_place = False
        self.old: list[t.Arrived] = []
        self.do(self.machine.begin())

    def do(self, actions: list[t.Action]) -> None:
        for action in actions:
            assert not self.ends, "something happens after the end"
            if isinstance(action, t.Deliver):
                assert action.first == len(self.delivered)
                self.delivered.extend(action.ids)
            elif isinstance(action, t.End | t.Fail):
                self.ends.append(action)
                self.wants_place = False
            elif isinstance(action, t.Place):
                self.wants_place = True

    def feed(self, event: t.Input) -> None:
        self.do(self.machine.on_event(event, self.now))

    def place(self) -> None:
        if self.wants_place:
            self.wants_place = False
            self.links += 1
            node = f"n{self.links % 3}"
            self.feed(placed(node, self.links, self.max_output, boot=f"b{self.links}"))

    def true_row(self, count: int) -> t.Arrived | None:
        machine = self.machine
        if machine.placement is None:
            return None
        first = len(machine.journal.ids)
        ids = self.oracle[first : min(first + count, self.max_output)]
        is_last = bool(ids) and (ids[-1] == EOS or first + len(ids) == self.max_output)
        finish = None
        if is_last:
            finish = FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH
        stop_id = EOS if finish is FinishReason.STOP else None
        return t.Arrived(
            machine.placement.link, machine.journal.epoch, first, ids, (), finish, stop_id
        )

    def step(self, kind: str, number: int) -> None:  # noqa: C901, PLR0912 - one line a kind
        self.now += SECOND // 10
        machine = self.machine
        at = machine.placement
        link, epoch = (at.link if at else 0), machine.journal.epoch
        truth = self.true_row(1 + number % 3)
        if kind == "tokens" and truth is not None:
            self.old.append(truth)
            self.feed(truth)
        elif kind == "stale" and self.old:
            stale = self.old[number % len(self.old)]
            if (stale.link, stale.epoch) != (link, epoch):
                self.feed(stale)
        elif kind == "faulty" and truth is not None:
            wrong = replace(truth, first=truth.first + 1 + number % 2)
            self.feed(wrong if number % 3 else replace(truth, ids=(VOCABULARY + 1,)))
        elif kind == "foreign" and truth is not None:
            self.feed(replace(truth, link=link + 1, ids=(999,) * max(1, len(truth.ids))))
        elif kind == "lost":
            self.feed(t.NodeLost(link, list(t.Loss)[number % len(t.Loss)]))
        elif kind == "stalled":
            self.feed(t.Stalled(link, epoch))
        elif kind == "closed":
            reasons = [reason for reason in CloseReason if reason is not CloseReason.DEADLINE]
            self.feed(t.ClosedByNode(link, epoch, reasons[number % len(reasons)]))
        elif kind == "busy":
            self.feed(t.RefusedByNode(link, epoch, ErrorCode.OVERLOADED))
        elif kind == "relieve":
            # sometimes of a placement that is over, sometimes to a node that is not there
            target = (None, f"n{number % 4}")[number % 2]
            self.feed(t.Relieved(link + (number % 5 == 4), epoch - (number % 7 == 6), target))
        elif kind == "verdict":
            boot = f"b{max(0, self.links - number % 2)}"
            self.feed(t.BootVerdict(boot, is_lost=number % 3 == 0))
        elif kind == "tick":
            self.now += number * SECOND // 4
            self.feed(t.Tick())
        elif kind == "place":
            self.place()


KINDS = [
    "tokens",
    "stale",
    "faulty",
    "foreign",
    "lost",
    "stalled",
    "closed",
    "busy",
    "relieve",
    "verdict",
    "tick",
    "place",
]
STEPS = st.lists(
    st.tuples(st.sampled_from([*KINDS, *["tokens"] * 8, *["place"] * 6]), st.integers(0, 12)),
    max_size=80,
)


@given(
    oracle=st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=25),
    stops=st.booleans(),
    steps=STEPS,
)
@settings(max_examples=400, deadline=None)
def test_whatever_happens_the_output_is_the_oracles_and_it_ends_once(
    oracle: Any, stops: Any, steps: Any
) -> None:
    tokens = (*oracle, EOS) if stops else tuple(oracle)
    world = World(tokens, max_output=len(tokens))
    for kind, number in steps:
        world.step(kind, number)
        assert tuple(world.delivered) == tokens[: len(world.delivered)]
        assert world.machine.journal.failures <= LIMITS.moves_max + 1
        assert world.machine.journal.moves <= LIMITS.moves_max + DRAINS_MAX
    # Liveness: the faults stop, and it ends.
    for _ in range(200):
        if world.ends:
            break
        world.step("place", 0)
        world.step("tokens", 2)
        world.step("tick", 12)
    assert len(world.ends) == 1
    if isinstance(world.ends[0], t.End):
        assert tuple(world.delivered) == tokens
        assert world.machine.journal.ids == world.delivered
    else:
        assert world.ends[0].code in (
            ErrorCode.MOVES_EXHAUSTED,
            ErrorCode.REQUEST_QUARANTINED,
        )
    before = list(world.delivered)
    for kind in KINDS:
        world.step(kind, 1)
    assert world.delivered == before


@given(cut=st.integers(0, 5), count=st.integers(0, 6))
def test_a_stop_across_a_move_counts_only_what_it_kept(cut: Any, count: Any) -> None:
    oracle = (10, 11, 12, 13, 14, 15)
    world = World(oracle, 6)
    world.place()
    for _ in range(cut):
        world.step("tokens", 0)
    world.step("lost", 1)
    world.place()
    kept = min(count, len(world.delivered))
    world.feed(t.StopAt(kept))
    assert world.machine.journal.ids == list(oracle[:kept])
    assert world.ends == [t.End(FinishReason.STOP)]


def test_a_session_goes_on_over_a_fresh_link_under_a_raised_epoch_and_that_is_no_move() -> None:
    machine = taken(begun())
    machine.on_event(row(machine, 10, 11), 0)
    late = row(machine, 12)
    assert machine.on_event(t.Relinked(1, 9, 2), 0) == []  # of another epoch
    assert machine.on_event(t.Relinked(7, 1, 2), 0) == []  # of another link
    assert machine.on_event(t.Relinked(1, 1, 2), 0) == [t.SendOpen(2, 6)]
    assert (machine.placement.node, machine.placement.link) == ("a", 2)
    assert machine.on_event(late, 0) == []  # what the old link still says
    assert machine.on_event(replace(late, epoch=2), 0) == []  # the new epoch on the old link
    assert machine.on_event(t.NodeLost(1, t.Loss.CUT), 0) == []  # the old link goes
    assert machine.stale_rows == 2
    assert machine.on_event(row(machine, 12), 0) == [t.Deliver(2, (12,), ())]
    assert (machine.journal.moves, machine.journal.failures) == (0, 0)


def test_a_session_that_the_node_does_not_take_over_a_fresh_link_moves_like_any_other() -> None:
    machine = taken(begun())
    machine.on_event(row(machine, 10), 0)
    machine.on_event(t.Relinked(1, 1, 2), 0)
    actions = machine.on_event(t.RefusedByNode(2, 2, ErrorCode.SESSION_LIMIT), 0)
    assert kinds(actions)[-1] == "Place"
    assert machine.journal.epoch == 3


def test_a_session_whose_link_broke_while_the_node_stays_moves_to_the_same_node() -> None:
    machine = taken(begun())
    actions = machine.on_event(t.NodeLost(1, t.Loss.LINK), 0)
    assert kinds(actions) == ["Leave", "Announce", "Place"]
    assert actions[-1].target == "a"
    assert machine.journal.boots_suspected == set()
    assert machine.journal.failures == 1
