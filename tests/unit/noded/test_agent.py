"""A node and heads over loopback TLS: from OPEN to the end, and every way in which it ends earlier."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from itertools import pairwise

import pytest

from superfluid_core.clock import MS
from superfluid_core.errors import ErrorCode
from superfluid_core.limits import LinkLimits
from superfluid_core.link.dial import DialError
from superfluid_core.session import FinishReason, QosClass, SamplingParams
from superfluid_core.wire.messages import (
    CancelSession,
    CloseReason,
    DrainOrder,
    FileAsk,
    FilePiece,
    Goaway,
    Opened,
    ProgressReport,
    Renew,
    Sessions,
    SessionsAsk,
    SetClass,
    Stats,
    StatsAsk,
    Status,
    Tokens,
)
from tests.unit.noded.conftest import TEXTS, NodeRig, check, serving

EOS = TEXTS.eos_ids[0]


def test_a_session_is_opened_streamed_and_finished_in_its_last_row() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(max_output=12)
        await head.until(head.is_finished)
        (opened,) = head.of(Opened)
        assert (opened.session, opened.epoch) == (1, 1)
        assert len(head.ids()) == 12
        assert head.rows()[-1].finish is FinishReason.LENGTH
        assert head.closed() is None
        reports = head.of(ProgressReport)
        assert (reports[0].done, reports[0].total) == (5, 5)

    check(body)


def test_a_scripted_end_of_text_names_the_stop_id() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open()
        await head.until(head.is_finished)
        assert bytes(head.ids()[:-1]) == b"Hi!"
        assert head.rows()[-1].finish is FinishReason.STOP
        assert head.rows()[-1].stop_id == EOS == head.ids()[-1]

    check(body, '{"pieces": ["Hi", "!", {"eos": true}]}')


def test_a_moved_session_goes_on_where_the_other_node_stopped() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, max_output=20, sampling=SamplingParams(seed=5, logprobs=2))
        await head.until(lambda: head.is_finished(1))
        whole = head.ids(1)
        assert all(len(row.logprobs) == len(row.ids) for row in head.rows(1))
        head.open(2, delivered=tuple(whole[:7]), max_output=20, sampling=SamplingParams(seed=5))
        await head.until(lambda: head.is_finished(2))
        assert head.rows(2)[0].first == 7
        assert [token for row in head.rows(2) for token in row.ids] == whole[7:]

    check(body)


def test_one_frame_carries_a_step_of_all_sessions_of_the_link() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        for session in range(1, 5):
            head.open(session, max_output=10)
        await head.until(lambda: all(head.is_finished(session) for session in range(1, 5)))
        frames = head.of(Tokens)
        assert max(len(frame.rows) for frame in frames) == 4
        assert len(frames) < 25

    check(body, decode_rate=100.0)


def test_a_cancel_frees_the_lane_and_is_confirmed_once() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(max_output=1000)
        await head.until(lambda: len(head.ids()) > 2)
        head.link.send(CancelSession(1, 9, "another epoch"))
        head.link.send(CancelSession(1, 1, "client gone"))
        head.link.send(CancelSession(1, 1, "again"))
        await head.until(head.closed)
        closed = head.closed()
        assert closed is not None
        assert closed.reason is CloseReason.CANCELLED
        await rig.until(lambda: rig.node.scheduler.stats().lanes_busy == 0)

    check(body, decode_rate=100.0)


@pytest.mark.slow
def test_a_lapsed_lease_fences_the_session_and_a_renewal_cannot_revive_it() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(max_output=1000)
        await head.until(lambda: len(head.ids()) > 2)
        rig.clock.jumped_ns = 11_000_000_000
        head.link.send(Renew(rig.clock.boot_ns()))
        await head.until(head.closed)
        closed = head.closed()
        assert closed is not None
        assert closed.reason is CloseReason.FENCED
        seen = len(head.ids())
        await asyncio.sleep(0.3)
        assert len(head.ids()) == seen
        head.open(1, epoch=1, max_output=3)
        await head.until(lambda: head.refused(1))
        refusal = head.refused(1)
        assert refusal is not None
        assert refusal.code is ErrorCode.FENCED
        head.open(1, epoch=2, prompt="hello", max_output=seen + 3, delivered=tuple(head.ids()))
        await head.until(head.is_finished)

    check(body, decode_rate=100.0)


def test_renewals_keep_a_lease_alive() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(max_output=40, lease_ttl_ms=150)
        for _ in range(10):
            await asyncio.sleep(0.05)
            status = head.status()
            if status is not None:
                head.link.send(Renew(rig.clock.boot_ns() - 1))
        await head.until(head.is_finished)
        assert len(head.ids()) == 40

    check(body, decode_rate=100.0)


def test_an_open_whose_stamp_has_aged_beyond_its_lease_is_refused_as_fenced() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(lease_stamp_ns=rig.clock.boot_ns() - 11_000_000_000)
        await head.until(head.refused)
        refusal = head.refused()
        assert refusal is not None
        assert refusal.code is ErrorCode.FENCED

    check(body)


def test_a_higher_epoch_supersedes_and_a_stale_one_is_refused() -> None:
    async def body(rig: NodeRig) -> None:
        first, second = await rig.link(), await rig.link()
        first.open(epoch=1, max_output=1000)
        await first.until(lambda: len(first.ids()) > 1)
        second.open(epoch=2, max_output=5)
        await second.until(second.is_finished)
        seen = len(first.ids())
        first.open(epoch=1)
        await first.until(first.refused)
        refusal = first.refused()
        assert refusal is not None
        assert (refusal.code, refusal.epoch) == (ErrorCode.FENCED, 1)
        assert len(first.ids()) - seen <= 2
        assert {row.epoch for row in second.rows()} == {2}

    check(body, decode_rate=100.0)


def test_two_heads_may_use_the_same_session_number() -> None:
    async def body(rig: NodeRig) -> None:
        one, two = await rig.link("head-1"), await rig.link("head-2")
        one.open(max_output=6)
        two.open(max_output=8)
        await one.until(one.is_finished)
        await two.until(two.is_finished)
        assert two.ids()[:6] == one.ids()
        assert (len(one.ids()), len(two.ids())) == (6, 8)

    check(body)


def test_a_lost_link_cancels_what_it_had_and_nothing_else() -> None:
    async def body(rig: NodeRig) -> None:
        one, two = await rig.link("head-1"), await rig.link("head-2")
        for session in (1, 2):
            one.open(session, max_output=2000)
        two.open(max_output=60)
        await one.until(lambda: len(one.ids(1)) > 1)
        one.link.abort("gone")
        await rig.until(lambda: rig.node.scheduler.stats().lanes_busy <= 1)
        await two.until(two.is_finished)
        assert len(two.ids()) == 60

    check(body, decode_rate=200.0)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "other"}, ErrorCode.MODEL_NOT_FOUND),
        ({"prompt": "x" * 5000}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"stop_ids": (5000,)}, ErrorCode.INVALID_REQUEST),
        ({"prompt_logprobs": 1}, ErrorCode.UNSUPPORTED),
    ],
)  # fmt: skip
def test_an_open_that_cannot_run_is_refused_and_the_link_lives_on(
    fields: dict[str, object], code: ErrorCode
) -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(7, epoch=4, **fields)  # type: ignore[arg-type] # by name for brevity
        await head.until(lambda: head.refused(7))
        refusal = head.refused(7)
        assert refusal is not None
        assert (refusal.code, refusal.epoch) == (code, 4)
        head.open(8, model="alias", max_output=2)
        await head.until(lambda: head.is_finished(8))

    check(body)


def test_a_link_may_hold_twice_the_lanes_and_no_more() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        for session in range(1, 10):
            head.open(session, max_output=500)
        await head.until(lambda: head.refused(9))
        refusal = head.refused(9)
        assert refusal is not None
        assert refusal.code is ErrorCode.SESSION_LIMIT
        assert len(head.of(Opened)) == 8

    check(body, decode_rate=50.0)


def test_a_lane_fault_closes_its_session_with_the_code() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open()
        await head.until(head.closed)
        closed = head.closed()
        assert closed is not None
        assert (closed.reason, closed.code) == (CloseReason.ERROR, ErrorCode.NAN_LOGITS)
        assert bytes(head.ids()) == b"ab"

    check(body, '{"pieces": ["abc"], "fault": "nan", "fault_at": 2}')


def test_a_deadline_closes_a_session_that_still_runs() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(max_output=1000, deadline_ms=150)
        await head.until(head.closed)
        closed = head.closed()
        assert closed is not None
        assert closed.reason is CloseReason.DEADLINE

    check(body, decode_rate=50.0)


def test_status_comes_when_the_load_changes_and_then_four_times_a_second() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        await asyncio.sleep(0.1)
        assert head.status() is None
        head.open(max_output=10_000)
        await head.until(lambda: (status := head.status()) is not None and status.lanes_busy == 1)
        before = len(head.of(Status))
        await head.until(lambda: len(head.of(Status)) >= before + 3)
        # by the node's own stamps: a busy machine makes them rarer, never more frequent (their period: test_status_time.py)
        stamps = [status.stamp_ns for status in head.of(Status)[before - 1 :]]
        gaps = [later - earlier for earlier, later in pairwise(stamps)]
        assert min(gaps) >= LinkLimits().status_ms * MS
        await head.until(lambda: (status := head.status()) is not None and status.decode_rates)
        status = head.status()
        assert status is not None
        assert status.steps > 0
        assert not status.draining
        head.link.send(CancelSession(1, 1, "done"))
        await head.until(lambda: (status := head.status()) is not None and status.lanes_busy == 0)

    check(body, decode_rate=100.0)


def test_the_class_of_a_waiting_session_can_be_changed() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, max_output=10_000)
        head.open(2, max_output=3, qos=QosClass.BACKGROUND)
        await head.until(lambda: len(head.of(Opened)) == 2)
        head.link.send(SetClass(2, 1, QosClass.INTERACTIVE))
        await head.until(lambda: head.is_finished(2))
        assert not head.is_finished(1)

    check(body, lanes=1, decode_rate=100.0)


@pytest.mark.slow
def test_a_session_that_waits_is_reported_every_second() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, max_output=10_000)
        head.open(2, max_output=3)
        await head.until(lambda: len([r for r in head.of(ProgressReport) if r.session == 2]) >= 2)

    check(body, lanes=1, decode_rate=100.0)


def test_files_come_in_pieces_with_a_digest_and_unknown_names_empty() -> None:
    data = bytes(range(256)) * 500

    async def main() -> None:
        async with serving(files={"tokenizer.json": data}) as rig:
            head = await rig.link()
            head.link.send(FileAsk(1, "alias", "tokenizer.json"))
            head.link.send(FileAsk(2, "m", "secrets.txt"))
            head.link.send(FileAsk(3, "other", "tokenizer.json"))
            await head.until(lambda: len(head.of(FilePiece)) >= 5)
            pieces = [piece for piece in head.of(FilePiece) if piece.request == 1]
            assert [piece.piece for piece in pieces] == [0, 1, 2]
            assert b"".join(piece.data for piece in pieces) == data
            assert {piece.digest for piece in pieces} == {sha256(data).hexdigest()}
            for request in (2, 3):
                (empty,) = [piece for piece in head.of(FilePiece) if piece.request == request]
                assert (empty.data, empty.digest, empty.pieces) == (b"", "", 1)

    asyncio.run(main())


def test_every_node_of_these_tests_has_an_identity_of_its_own() -> None:
    async def main() -> None:
        async with serving() as one, serving() as other:
            cards = [each.node.agent.card.identity for each in (one, other)]
            assert cards[0] != cards[1]

    asyncio.run(main())


def test_stats_and_sessions_are_answered() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        for session in (11, 12):
            head.open(session, max_output=10_000, tenant="acme")
        await head.until(lambda: len(head.of(Opened)) == 2)
        head.link.send(StatsAsk(1))
        head.link.send(SessionsAsk(2))
        await head.until(lambda: head.of(Stats) and head.of(Sessions))
        figures = json.loads(b"".join(piece.data for piece in head.of(Stats)))
        assert figures["scheduler"]["lanes"] == 4
        assert figures["node"]["identity"] == rig.node.agent.card.identity
        rows = [row for piece in head.of(Sessions) for row in piece.rows]
        assert [(row.head, row.session, row.tenant) for row in rows] == [
            ("head-1", 11, "acme"),
            ("head-1", 12, "acme"),
        ]

    check(body, decode_rate=100.0)


def test_a_renewal_from_the_future_is_a_breach_that_ends_the_link() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(max_output=10_000)
        await head.until(head.ids)
        head.link.send(Renew(rig.clock.boot_ns() + 10**12))
        await rig.until(lambda: not head.link.is_open)
        await rig.until(lambda: not rig.node.agent.roster.live)

    check(body, decode_rate=100.0)


def test_a_drain_that_a_head_orders_lets_sessions_finish_and_refuses_new_ones_of_all_heads() -> (
    None
):
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, max_output=30)
        await head.until(lambda: head.ids(1))
        head.link.send(DrainOrder(60_000))
        await head.until(lambda: (status := head.status()) is not None and status.draining)
        head.open(2)
        await head.until(lambda: head.refused(2))
        refusal = head.refused(2)
        assert refusal is not None
        assert refusal.code is ErrorCode.DRAINING
        other = await rig.link("head-2")
        await other.until(lambda: (status := other.status()) is not None and status.draining)
        other.open(3)
        await other.until(lambda: other.refused(3))
        await head.until(lambda: head.is_finished(1))
        assert not head.of(Goaway)
        assert head.link.is_open

    check(body, decode_rate=100.0)


def test_any_head_ends_a_drain_and_sessions_are_taken_again() -> None:
    async def body(rig: NodeRig) -> None:
        head, other = await rig.link(), await rig.link("head-2")
        head.link.send(DrainOrder(60_000))
        await other.until(lambda: (status := other.status()) is not None and status.draining)
        other.link.send(DrainOrder(None))
        await head.until(lambda: (status := head.status()) is not None and not status.draining)
        head.open(1)
        await head.until(lambda: head.is_finished(1))
        assert not rig.node.scheduler.stats().draining

    check(body)


def test_a_node_that_leaves_takes_no_new_link_and_is_not_called_back() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, max_output=30)
        await head.until(lambda: head.ids(1))
        rig.node.agent.drain(60_000, leaving=True)
        head.link.send(DrainOrder(None))
        with pytest.raises(DialError, match="leaving"):
            await rig.link("head-2")
        head.open(2)
        await head.until(lambda: head.refused(2) and head.is_finished(1))
        assert rig.node.agent.is_draining

    check(body, decode_rate=100.0)


def test_who_has_no_lane_by_its_start_deadline_is_dropped_and_who_has_runs_on() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, max_output=40, start_deadline_ms=50)
        await head.until(lambda: head.ids(1))
        head.open(2, qos=QosClass.BACKGROUND, start_deadline_ms=50)
        await head.until(lambda: head.closed(2))
        closed = head.closed(2)
        assert closed is not None
        assert (closed.reason, closed.code) == (CloseReason.DEADLINE, ErrorCode.DEADLINE_EXCEEDED)
        assert head.ids(2) == []
        await head.until(lambda: head.is_finished(1))
        assert len(head.ids(1)) == 40

    check(body, lanes=1, decode_rate=100.0)


def test_what_outlives_the_grace_of_a_drain_is_closed_as_drained() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(max_output=10_000)
        await head.until(head.ids)
        rig.node.agent.drain(100, leaving=True)
        await head.until(head.closed)
        closed = head.closed()
        assert closed is not None
        assert (closed.reason, closed.code) == (CloseReason.DRAIN, ErrorCode.DRAINING)
        assert head.of(Goaway)

    check(body, decode_rate=100.0)


@pytest.mark.slow
def test_opens_and_cancels_in_a_storm_leak_nothing() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, max_output=150)
        await head.until(lambda: head.ids(1))
        for session in range(2, 602):
            head.open(session, prompt=f"storm {session}")
            head.link.send(CancelSession(session, 1, "storm"))
            if session % 20 == 0:
                await asyncio.sleep(0.005)
        await head.until(lambda: head.is_finished(1))
        await rig.until(lambda: not rig.node.agent.roster.live)
        answered = {message.session for message in head.of(Opened)} | {
            session for session in range(2, 602) if head.refused(session)
        }
        await head.until(lambda: True)
        assert len(answered) == 601
        codes = {refusal.code for session in range(2, 602) if (refusal := head.refused(session))}
        assert codes <= {ErrorCode.RATE_LIMIT_EXCEEDED, ErrorCode.SESSION_LIMIT}

    check(body, decode_rate=100.0)


def test_a_message_that_cannot_be_sent_costs_its_link_and_no_other() -> None:
    async def body(rig: NodeRig) -> None:
        one, two = await rig.link("head-1"), await rig.link("head-2")
        one.open(max_output=10_000)
        two.open(max_output=30)
        await one.until(one.ids)
        broken = next(
            head for head in rig.node.agent.roster.heads.values() if head.name == "head-1"
        )
        rig.node.agent.roster.send(broken, (CancelSession(1, 1, "nodes cancel nothing"),))
        await rig.until(lambda: not one.link.is_open)
        await two.until(two.is_finished)

    check(body, decode_rate=100.0)


def test_a_head_that_reads_nothing_is_cut_off_and_its_session_cancelled() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link("slow")
        assert head.link.transport is not None
        head.link.transport.pause_reading()
        (end,) = rig.node.agent.roster.heads.values()
        head.open(max_output=100)
        await rig.until(lambda: rig.node.agent.roster.live)
        piece = FilePiece(1, 0, 1, "", b"x" * 40_000)
        for _ in range(LinkLimits().outgoing_bytes_max // 40_000 + 400):
            rig.node.agent.roster.send(end, (piece,))
        await rig.until(lambda: not rig.node.agent.roster.live)
        assert end.link.close_reason is not None
        assert "slow peer" in end.link.close_reason
        head.link.abort("nobody reads here")

    check(body, decode_rate=20.0)
