"""Which node is chosen, and the figures that the placement is held to."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from superfluid_core.placement.policies import Choice, Policy, Refusal, RefusalKind, choose
from superfluid_core.placement.reserve import Placed, Reservation, fold_load, place
from superfluid_core.placement.view import Fit, Load, PlacementLimits, fit
from superfluid_core.session import QosClass

LIMITS = PlacementLimits()


def place_one(
    view: Any, request: Any, policy: Any = Policy.LOAD_AWARE, draw: Any = 0.0, now_ns: Any = 0
) -> Any:
    return place(view, request, policy, LIMITS, draw=draw, now_ns=now_ns)


def test_a_burst_of_64_on_a_frozen_report_spreads_over_four_equal_idle_nodes(
    kit: Any, draws: Any
) -> None:
    view = kit.view(*(kit.node(name, lanes=16) for name in "abcd"))
    shares: Counter[str] = Counter()
    for _ in range(64):
        placed = place_one(view, kit.request(), draw=draws())
        assert isinstance(placed, Placed)
        shares[placed.choice.node] += 1
    assert max(shares.values()) / (64 / 4) <= 1.10
    assert len(shares) == 4


@pytest.mark.parametrize("seed", range(5))
def test_a_burst_with_mixed_prompts_spreads_the_tokens(kit: Any, draws: Any, seed: Any) -> None:
    drawn = random.Random(seed)
    view = kit.view(*(kit.node(name, lanes=16) for name in "abcd"))
    tokens: Counter[str] = Counter()
    for _ in range(64):
        request = kit.request(drawn.randint(50, 2_000))
        placed = place_one(view, request, draw=draws())
        assert isinstance(placed, Placed)
        tokens[placed.choice.node] += request.prompt
    mean = sum(tokens.values()) / 4
    assert max(tokens.values()) / mean <= 1.15


def test_a_burst_follows_speeds_of_two_to_one_to_one_to_one(kit: Any, draws: Any) -> None:
    speeds = {"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0}
    view = kit.view(*(kit.node(name, lanes=64, speed=speed) for name, speed in speeds.items()))
    shares: Counter[str] = Counter()
    for _ in range(100):
        placed = place_one(view, kit.request(), draw=draws())
        assert isinstance(placed, Placed)
        shares[placed.choice.node] += 1
    for name, speed in speeds.items():
        assert shares[name] == pytest.approx(100 * speed / 5.0, rel=0.10)


def test_a_thousand_requests_one_after_the_other_share_four_idle_nodes(
    kit: Any, draws: Any
) -> None:
    view = kit.view(*(kit.node(name) for name in "abcd"))
    shares: Counter[str] = Counter()
    for _ in range(1_000):
        placed = place_one(view, kit.request(), draw=draws())
        assert isinstance(placed, Placed)
        shares[placed.choice.node] += 1
        placed.reservation.release()
        view.nodes[placed.choice.node].held.departed = 0
    assert max(shares.values()) / 250 <= 1.10
    assert min(shares.values()) / 250 >= 0.90


def test_sustained_load_on_equal_nodes_stays_within_ten_percent(kit: Any, draws: Any) -> None:
    """A little simulation: a session takes as long as its node's lanes and speed say."""
    speeds = dict.fromkeys("abcd", 1.0)
    view = kit.view(*(kit.node(name, lanes=64, speed=speed) for name, speed in speeds.items()))
    shares: Counter[str] = Counter()
    running: list[tuple[float, int, Placed]] = []
    for n in range(2_000):
        now = n * 0.025
        while running and running[0][0] <= now:
            running.pop(0)[2].reservation.release()
        for node in view.nodes.values():
            node.held.departed = 0
        placed = place_one(view, kit.request(), draw=draws())
        assert isinstance(placed, Placed)
        name = placed.choice.node
        shares[name] += 1
        lanes = view.nodes[name].held.sessions
        seconds = (300 / 4_000 + 60 * (0.02 + 0.001 * lanes)) / speeds[name]
        running.append((now + seconds, n, placed))
        running.sort(key=lambda entry: entry[:2])
    for name, speed in speeds.items():
        assert shares[name] == pytest.approx(2_000 * speed / 4.0, rel=0.10)


@pytest.mark.parametrize("seed", range(3))
def test_fifty_nodes_that_are_mostly_idle_take_turns_whoever_is_idle(kit: Any, seed: int) -> None:
    """Four requests a node, one after another, each gone before its node's next turn: nobody gets a fifth."""
    # drawn values fall on a list of ties that changes with every request: some nodes got six, others one (`fifty`)
    drawn = random.Random(seed)
    view = kit.view(*(kit.node(f"n{i}", lanes=8) for i in range(50)))
    shares: Counter[str] = Counter()
    running: list[tuple[int, Placed]] = []
    for n in range(200):
        for due, placed in [each for each in running if each[0] <= n]:
            placed.reservation.release()
            view.nodes[placed.choice.node].held.departed = 0
            view.nodes[placed.choice.node].touch()
            running.remove((due, placed))
        placed = place_one(view, kit.request(), draw=drawn.random())
        assert isinstance(placed, Placed)
        shares[placed.choice.node] += 1
        running.append((n + drawn.randint(5, 49), placed))
    assert set(shares.values()) == {4}


def test_among_equals_the_one_chosen_longest_ago_is_next_and_of_new_ones_the_drawn(
    kit: Any,
) -> None:
    view = kit.view(*(kit.node(name, lanes=64) for name in "abcd"))

    def take(draw: float) -> str:
        placed = place_one(view, kit.request(), draw=draw)
        assert isinstance(placed, Placed)
        placed.reservation.release()
        view.nodes[placed.choice.node].held.departed = 0
        view.nodes[placed.choice.node].touch()
        return placed.choice.node

    assert [take(draw) for draw in (0.6, 0.0, 0.0, 0.9)] == ["c", "a", "b", "d"]
    assert [take(0.5) for _ in range(4)] == ["c", "a", "b", "d"]
    view.remove("a")
    view.add(kit.node("e", lanes=64))
    assert [take(0.9) for _ in range(5)] == ["e", "c", "b", "d", "e"]


def test_queued_prompt_tokens_push_a_request_to_the_other_node(kit: Any) -> None:
    busy, idle = kit.node("a"), kit.node("b")
    busy.load = Load(8, 3, 20_000, 0, 100_000, 4_000.0, busy.load.decode_rates)
    placed = place_one(kit.view(busy, idle), kit.request())
    assert isinstance(placed, Placed)
    assert placed.choice.node == "b"


def test_cached_tokens_pull_a_request(kit: Any) -> None:
    view = kit.view(kit.node("a"), kit.node("b"))
    placed = place_one(view, kit.request(4_000, cached={"b": 3_900}))
    assert isinstance(placed, Placed)
    assert placed.choice.node == "b"


def test_a_new_node_without_rates_counts_as_the_mean_of_the_known(kit: Any) -> None:
    known, fresh = kit.node("a"), kit.node("b")
    fresh.load = Load(blocks=100_000)
    known.load = Load(6, 0, 3_000, 0, 100_000, 4_000.0, known.load.decode_rates)
    placed = place_one(kit.view(known, fresh), kit.request())
    assert isinstance(placed, Placed)
    assert placed.choice.node == "b"
    score = {s.node: s.score for s in placed.choice.scores}
    assert score["b"] == pytest.approx(300 / 4_000, abs=0.05)


def test_a_node_with_a_full_pool_is_skipped_while_another_is_not(kit: Any) -> None:
    full, loaded = kit.node("a"), kit.node("b")
    full.load = Load(0, 0, 0, 90_000, 100_000, 4_000.0, full.load.decode_rates)
    loaded.load = Load(7, 2, 9_000, 89_000, 100_000, 4_000.0, loaded.load.decode_rates)
    placed = place_one(kit.view(full, loaded), kit.request())
    assert isinstance(placed, Placed)
    assert placed.choice.node == "b"
    loaded.load = Load(7, 2, 9_000, 95_000, 100_000, 4_000.0, loaded.load.decode_rates)
    again = place_one(kit.view(full, loaded), kit.request())
    assert isinstance(again, Placed)
    assert again.choice.node == "a"


def test_least_loaded_picks_the_fewest_sessions(kit: Any) -> None:
    a, b = kit.node("a"), kit.node("b", speed=0.1)
    a.load = Load(3, 0, 0, 0, 100_000, 4_000.0, a.load.decode_rates)
    placed = place_one(kit.view(a, b), kit.request(), Policy.LEAST_LOADED)
    assert isinstance(placed, Placed)
    assert placed.choice.node == "b"


def test_round_robin_rotates_evenly_over_those_that_can(kit: Any) -> None:
    view = kit.view(*(kit.node(name) for name in "abcd"))
    view.nodes["b"].is_up = False
    order = []
    for _ in range(6):
        placed = place_one(view, kit.request(), Policy.ROUND_ROBIN)
        assert isinstance(placed, Placed)
        order.append(placed.choice.node)
    assert order == ["a", "c", "d", "a", "c", "d"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"is_up": False}, Fit.DOWN),
        ({"is_draining": True}, Fit.DRAINING),
        ({"is_ready": False}, Fit.CIRCUIT_OPEN),
        ({"is_suspect": True}, Fit.SUSPECT),
        ({"busy_until_ns": 5}, Fit.BUSY),
        ({"offers": {}}, Fit.NOT_SERVED),
    ],
)
def test_a_node_that_cannot_take_it_says_why(kit: Any, change: Any, word: Any) -> None:
    node = kit.node("a")
    for name, value in change.items():
        setattr(node, name, value)
    assert fit(node, kit.request(), LIMITS, 0) is word


def test_other_weights_never_take_a_session_that_has_begun(kit: Any) -> None:
    view = kit.view(kit.node("a", weights="old"), kit.node("b", weights="new"))
    view.nodes["a"].is_up = False
    verdict = place_one(view, kit.request(delivered=5, is_move=True, weights="old"))
    assert isinstance(verdict, Refusal)
    assert verdict.kind is RefusalKind.NO_NODE


def test_lanes_and_two_more_then_full_but_an_interactive_one_may_preempt(kit: Any) -> None:
    view = kit.view(kit.node("a", lanes=2))
    for _ in range(4):
        assert isinstance(place_one(view, kit.request()), Placed)
    full = place_one(view, kit.request())
    assert isinstance(full, Refusal)
    assert full.kind is RefusalKind.FULL
    view.nodes["a"].sessions_max = 6
    urgent = kit.request(qos=QosClass.INTERACTIVE)
    assert isinstance(place_one(view, urgent), Placed)
    assert isinstance(place_one(view, urgent), Placed)
    assert isinstance(place_one(view, urgent), Refusal)


def test_what_no_window_holds_is_too_long_and_names_the_largest(kit: Any) -> None:
    view = kit.view(kit.node("a", window=1_000), kit.node("b", window=2_000))
    verdict = place_one(view, kit.request(1_900, max_output=200))
    assert isinstance(verdict, Refusal)
    assert (verdict.kind, verdict.window) == (RefusalKind.TOO_LONG, 2_000)


def test_a_window_that_is_down_is_waited_for_by_a_new_request(kit: Any) -> None:
    view = kit.view(kit.node("a", window=1_000), kit.node("b", window=4_000))
    view.nodes["b"].is_up = False
    verdict = place_one(view, kit.request(1_900))
    assert isinstance(verdict, Refusal)
    assert verdict.kind is RefusalKind.NO_NODE


def test_a_move_that_fits_a_smaller_window_only_gets_what_that_holds(kit: Any) -> None:
    view = kit.view(kit.node("a", window=1_000), kit.node("b", window=4_000))
    view.nodes["b"].is_up = False
    moved = place_one(view, kit.request(900, delivered=20, max_output=500, is_move=True))
    assert isinstance(moved, Placed)
    assert (moved.choice.node, moved.choice.max_output) == ("a", 100)
    too_far = place_one(view, kit.request(900, delivered=100, max_output=500, is_move=True))
    assert isinstance(too_far, Refusal)
    assert too_far.kind is RefusalKind.TOO_LONG


def test_the_node_that_failed_is_taken_again_only_if_it_is_the_only_one(kit: Any) -> None:
    view = kit.view(kit.node("a"), kit.node("b", lanes=1))
    request = kit.request(is_move=True, avoid=frozenset("a"))
    choice = choose(view, request, Policy.LOAD_AWARE, LIMITS, draw=0.0, now_ns=0)
    assert isinstance(choice, Choice)
    assert choice.node == "b"
    for _ in range(3):
        place_one(kit.view(view.nodes["b"]), kit.request())
    assert isinstance(place_one(view, request), Refusal)
    view.nodes["b"].is_up = False
    alone = place_one(view, request)
    assert isinstance(alone, Placed)
    assert alone.choice.node == "a"


def test_four_moved_sessions_prefill_on_a_node_at_a_time(kit: Any) -> None:
    view = kit.view(kit.node("a"))
    node = view.nodes["a"]
    node.load = replace(node.load, prefill_rate=0.0)  # nobody knows how long one takes
    moved = kit.request(prompt=4_000, is_move=True)
    taken = [place_one(view, moved) for _ in range(4)]
    refusal = place_one(view, moved)
    assert isinstance(refusal, Refusal)
    assert refusal.kind is RefusalKind.FULL
    first = taken[0]
    assert isinstance(first, Placed)
    first.reservation.started()
    assert isinstance(place_one(view, moved), Placed)


def test_short_prefills_of_moved_sessions_count_for_what_they_take(kit: Any) -> None:
    # of eleven sessions of a killed node eight began at once, and the last waited 0.7 s for two waves of 10 ms each
    view = kit.view(kit.node("a", lanes=64))
    node = view.nodes["a"]
    moved = kit.request(is_move=True)
    node.load = replace(node.load, prefill_rate=1_000 * moved.context / 19.5)  # 20 ms each
    taken = [place_one(view, moved) for _ in range(20)]
    assert all(isinstance(each, Placed) for each in taken)
    assert isinstance(place_one(view, moved), Refusal)


def test_a_moved_session_goes_where_a_lane_is_free_although_another_node_has_its_context(
    kit: Any,
) -> None:
    # a rolling restart put streams behind 67 busy lanes of 67, for up to 4 s, while 15 of 67 were in use elsewhere
    view = kit.view(kit.node("warm"), kit.node("free"))
    cached = {"warm": 4_000}
    load = replace(view.nodes["warm"].load, lanes_busy=8)
    fold_load(view.nodes["warm"], load, ())
    moved = kit.request(prompt=4_000, is_move=True, cached=cached)
    newcomer = kit.request(prompt=4_000, cached=cached)
    taken = [place_one(view, one) for one in (moved, newcomer)]
    assert [one.choice.node for one in taken if isinstance(one, Placed)] == ["free", "warm"]
    assert isinstance(taken[0], Placed)
    assert {each.node: each.fit for each in taken[0].choice.scores} == {
        "warm": Fit.FULL,
        "free": Fit.CAPABLE,
    }
    fold_load(view.nodes["free"], replace(view.nodes["free"].load, lanes_busy=8), ())
    placed = place_one(view, moved)  # nowhere is a lane free: then what is cached counts
    assert isinstance(placed, Placed)
    assert placed.choice.node == "warm"


def test_a_moved_session_waits_for_a_node_that_reads_contexts_rather_than_behind_busy_lanes(
    kit: Any,
) -> None:
    # 57 streams of a node that drained: two more than there were lanes left on one, for 2 to 3 s, and 50 free on another,
    # which read four moved contexts for 100 ms
    view = kit.view(kit.node("full"), kit.node("reading"))
    fold_load(view.nodes["full"], replace(view.nodes["full"].load, lanes_busy=8), ())
    moved = kit.request(prompt=4_000, is_move=True)
    read: list[Placed] = []
    while not isinstance(verdict := place_one(view, moved), Refusal):
        read.append(verdict)
    assert 1 <= len(read) < 8
    assert {each.choice.node for each in read} == {"reading"}
    assert verdict.kind is RefusalKind.FULL
    assert verdict.fits == {Fit.FULL, Fit.REPREFILLS}
    read[0].reservation.started()  # its first token is there
    placed = place_one(view, moved)
    assert isinstance(placed, Placed)
    assert placed.choice.node == "reading"
    # where it failed before it is not waited for
    elsewhere = place_one(view, replace(moved, avoid=frozenset({"reading"})))
    assert isinstance(elsewhere, Placed)
    assert elsewhere.choice.node == "full"


def test_a_moved_session_goes_to_a_node_that_warms_up_rather_than_behind_busy_lanes(
    kit: Any,
) -> None:
    # a rolling restart: two of three nodes had just come back, and what left the fourth waited up to 4 s on the full one
    view = kit.view(kit.node("full"), kit.node("warming"))
    fold_load(view.nodes["full"], replace(view.nodes["full"].load, lanes_busy=8), ())
    view.nodes["warming"].allowance = 0.1
    moved = kit.request(prompt=60, is_move=True)
    nodes = []
    for _ in range(8):
        placed = place_one(view, moved)
        assert isinstance(placed, Placed)
        nodes.append(placed.choice.node)
    assert nodes == ["warming"] * 8
    newcomer = place_one(view, kit.request(prompt=60))
    assert isinstance(newcomer, Placed)
    assert newcomer.choice.node == "full", "who is new is kept from it"


def test_a_moved_session_does_not_count_on_the_last_lanes_of_a_node_while_another_warms_up(
    kit: Any,
) -> None:
    # by a report of a moment ago: newcomers are kept from the others, so all of them come here, and the lane is gone
    lanes = 64
    view = kit.view(kit.node("nearly full", lanes=lanes), kit.node("warming", lanes=lanes))
    nearly = view.nodes["nearly full"]
    fold_load(nearly, replace(nearly.load, lanes_busy=lanes - LIMITS.sessions_over_lanes), ())
    view.nodes["warming"].allowance = 0.0
    view.nodes["warming"].held.sessions = 1
    moved = kit.request(prompt=60, is_move=True, cached={"nearly full": 60})
    placed = place_one(view, moved)
    assert isinstance(placed, Placed)
    assert placed.choice.node == "warming"
    # one lane more is enough, and so are the last ones where nothing else is
    fold_load(nearly, replace(nearly.load, lanes_busy=lanes - LIMITS.sessions_over_lanes - 1), ())
    again = place_one(view, moved)
    view.nodes["warming"].is_up = False
    alone = place_one(view, moved)
    found = [each.choice.node for each in (again, alone) if isinstance(each, Placed)]
    assert found == ["nearly full"] * 2


def test_free_lanes_of_the_node_that_failed_are_no_reason_to_queue_beside_one_that_warms_up(
    kit: Any,
) -> None:
    view = kit.view(kit.node("failed"), kit.node("full"), kit.node("warming"))
    fold_load(view.nodes["full"], replace(view.nodes["full"].load, lanes_busy=8), ())
    view.nodes["warming"].allowance = 0.0
    view.nodes["warming"].held.sessions = 1
    placed = place_one(view, kit.request(prompt=60, is_move=True, avoid=frozenset({"failed"})))
    assert isinstance(placed, Placed)
    assert placed.choice.node == "warming"


@pytest.mark.parametrize("rate", [0.0, 700.0], ids=["nothing measured", "measured with few"])
def test_short_contexts_move_together_whatever_a_node_made_of_single_ones(
    kit: Any, rate: float
) -> None:
    # 24 streams of a killed node: twenty stood still for 60 ms more until the first four had a token on a node that had
    # just started, or that had computed single prompts in steps of 40 ms
    view = kit.view(kit.node("survivor", lanes=48))
    node = view.nodes["survivor"]
    fold_load(node, replace(node.load, prefill_rate=rate), ())
    for _ in range(24):
        assert isinstance(place_one(view, kit.request(prompt=60, is_move=True)), Placed)
    assert isinstance(place_one(view, kit.request(prompt=4_000, is_move=True)), Placed)
    long = kit.request(prompt=4_000, is_move=True)
    more = [place_one(view, long) for _ in range(2)]
    assert isinstance(more[-1], Refusal)
    assert more[-1].fits == {Fit.REPREFILLS}


def test_unknown_model_is_told_from_no_node(kit: Any) -> None:
    view = kit.view(kit.node("a"))
    view.nodes["a"].offers = {}
    verdict = place_one(view, kit.request())
    assert isinstance(verdict, Refusal)
    assert verdict.kind is RefusalKind.UNKNOWN_MODEL


def test_the_choice_keeps_every_score_and_every_reason(kit: Any) -> None:
    view = kit.view(kit.node("a"), kit.node("b"), kit.node("c"))
    view.nodes["c"].is_draining = True
    placed = place_one(view, kit.request())
    assert isinstance(placed, Placed)
    by_node = {score.node: score for score in placed.choice.scores}
    assert by_node["a"].score is not None
    assert "prefill" in by_node["b"].detail
    assert (by_node["c"].score, by_node["c"].fit) == (None, "draining")


def test_a_reservation_is_released_once_and_reports_take_it_over(kit: Any) -> None:
    node = kit.node("a")
    request = kit.request(300)
    with Reservation(node, request) as reservation:
        assert (node.in_progress, node.queued_tokens) == (1, 300)
        fold_load(node, node.load, [reservation])
        assert node.in_progress == 1, "not acknowledged: no report can cover it"
        reservation.acknowledge()
        fold_load(node, Load(1, 0, 120, 0, 100_000), [reservation])
        assert (node.in_progress, node.queued_tokens) == (1, 120)
        reservation.release()
        assert node.in_progress == 0, "it departed after the report"
    reservation.release()
    assert (node.held.sessions, node.held.unreported_tokens, node.held.departed) == (0, 0, 1)
    fold_load(node, Load(blocks=100_000), [])
    assert node.held.departed == 0


def test_a_class_that_changes_is_counted_where_it_went(kit: Any) -> None:
    node = kit.node("a")
    reservation = Reservation(node, kit.request())
    reservation.set_qos(QosClass.INTERACTIVE)
    assert node.held.by_class == [1, 0, 0, 0]
    reservation.release()
    assert node.held.by_class == [0, 0, 0, 0]
