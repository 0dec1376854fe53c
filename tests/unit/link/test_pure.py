"""The decisions of the link that need no socket: addresses, binds, limits, liveness, queues."""

from __future__ import annotations

import pytest

from superfluid_core.clock import MS, SECOND
from superfluid_core.errors import ConfigError
from superfluid_core.limits import LinkLimits
from superfluid_core.link.addresses import format_address, is_loopback, judge_bind, parse_address
from superfluid_core.link.heartbeat import Liveness, OwnPause, Verdict
from superfluid_core.link.inbox import BYTES_MAX, MESSAGES_MAX, Inbox
from superfluid_core.link.outbox import Outbox
from superfluid_core.link.prelimits import LogGate, Prelimits, address_key
from superfluid_core.link.watch import Watch
from superfluid_core.session import FinishReason
from superfluid_core.wire import messages as m
from superfluid_core.wire.schema import Role

LIMITS = LinkLimits()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("box-a", ("box-a", 8454)),
        ("box-a:9000", ("box-a", 9000)),
        (" 127.0.0.1:0 ", ("127.0.0.1", 0)),
        ("[::1]:9000", ("::1", 9000)),
        ("[::1]", ("::1", 8454)),
        ("::1", ("::1", 8454)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)
def test_addresses_are_read(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text, 8454) == expected
    assert parse_address(format_address(*expected), 1) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":9000",
        "a:",
        "a:b",
        "a:65536",
        "a:-1",
        "a:+5",
        "[::1",
        "[::1]9000",
        "[]:1",
        "a b:1",
        "a:٣",
        "a:000001",
    ],
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text, 8454)


LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
EXPOSED = [
    "0.0.0.0",
    "::",
    "192.168.1.5",
    "100.64.0.2",
    "::ffff:0.0.0.0",
    "::ffff:10.0.0.1",
    "fe80::1%eth0",
    "name",
]


def test_without_a_key_only_loopback_may_be_bound() -> None:
    judge_bind(LOOPBACK, has_key=False, insecure=False)
    for address in EXPOSED:
        assert not is_loopback(address)
        for addresses in ([address], [*LOOPBACK, address]):
            with pytest.raises(ConfigError, match="without a fleet key"):
                judge_bind(addresses, has_key=False, insecure=False)
            judge_bind(addresses, has_key=True, insecure=False)
            judge_bind(addresses, has_key=False, insecure=True)
    with pytest.raises(ConfigError):
        judge_bind([], has_key=False, insecure=False)


# --- who may begin a handshake --------------------------------------------------------------------


def test_addresses_are_counted_as_v4_addresses_or_v6_networks() -> None:
    assert address_key("::ffff:10.0.0.1") == address_key("10.0.0.1") == "10.0.0.1"
    assert (
        address_key("2001:db8::1") == address_key("2001:db8::2") != address_key("2001:db8:0:1::1")
    )
    assert address_key("fe80::1%eth0") == address_key("fe80::2%eth1")
    assert address_key("not an address") == "not an address"


def test_a_crowd_from_one_address_is_limited_and_its_oldest_gives_way() -> None:
    gate = Prelimits(LIMITS)
    numbers = [gate.admit("10.0.0.1", 0).number for _ in range(8)]
    assert None not in numbers
    assert gate.admit("10.0.0.1", 400 * MS) == (None, None, "too many handshakes are pending")
    later = gate.admit("10.0.0.1", 600 * MS)
    assert (later.number, later.evicted) == (9, numbers[0])
    assert gate.pending == 8
    assert gate.admit("10.0.0.2", 600 * MS).evicted is None
    for number in (*numbers, 9, 10):
        gate.release(number or 0)
    assert gate.pending == 0


def test_pending_handshakes_are_bounded_over_all_addresses() -> None:
    gate = Prelimits(LIMITS)
    for host in range(200):
        gate.admit(f"10.0.0.{host}", 0)
    assert gate.pending == 64
    assert gate.admit("10.0.1.1", SECOND).evicted == 1
    assert gate.pending == 64


def test_new_connections_have_a_rate_per_address() -> None:
    gate = Prelimits(LIMITS)

    def admitted(now_ns: int, attempts: int) -> int:
        count = 0
        for _ in range(attempts):
            number = gate.admit("10.0.0.1", now_ns).number
            if number is not None:
                gate.release(number)
                count += 1
        return count

    assert admitted(0, 100) == 40
    assert admitted(SECOND, 100) == 20
    assert admitted(SECOND, 1) == 0
    assert gate.admit("10.0.0.2", SECOND).number is not None


def test_the_tables_of_addresses_are_bounded() -> None:
    gate, lines = Prelimits(LIMITS), LogGate()
    for host in range(5000):
        number = gate.admit(f"10.1.{host // 256}.{host % 256}", host).number
        gate.release(number or 0)
        lines.admit(f"10.1.{host // 256}.{host % 256}", host)
    assert len(gate._buckets) == len(lines._last) == 4096


def test_log_lines_are_one_a_second_an_address_and_count_the_rest() -> None:
    gate = LogGate()
    assert gate.admit("10.0.0.1", 0) == 0
    assert [gate.admit("10.0.0.1", now * MS) for now in (1, 500, 999)] == [None] * 3
    assert gate.admit("10.0.0.2", 999 * MS) == 0
    assert gate.admit("10.0.0.1", 1000 * MS) == 3
    assert gate.admit("10.0.0.1", 2000 * MS) == 0


# --- liveness -------------------------------------------------------------------------------------


def status(steps: int, busy: int = 1, predicted_ms: int = 40) -> m.Status:
    return m.Status(1, steps, busy, 8, (0, 0, 0, 0), 0, 0, 0, 64, 1.0, (), predicted_ms, False)


def test_a_silent_node_is_suspected_then_dead() -> None:
    live = Liveness(LIMITS, 0)
    assert live.verdict(0, 1) is Verdict.ALIVE
    assert live.verdict(999 * MS, 1) is Verdict.ALIVE
    assert live.verdict(1000 * MS, 1) is Verdict.SUSPECT
    assert live.verdict(2999 * MS, 1) is Verdict.SUSPECT
    assert live.verdict(3000 * MS, 1) is Verdict.DEAD
    live.on_bytes(3001 * MS)
    assert live.verdict(3100 * MS, 1) is Verdict.ALIVE


def test_an_idle_node_owes_nothing_but_its_pongs() -> None:
    live = Liveness(LIMITS, 0)
    assert live.verdict(14 * SECOND, 0) is Verdict.ALIVE
    assert live.verdict(14 * SECOND, 1) is Verdict.ALIVE  # its time starts with the session
    assert live.verdict(15 * SECOND, 1) is Verdict.SUSPECT
    assert live.verdict(17 * SECOND, 1) is Verdict.DEAD
    assert live.verdict(17 * SECOND, 0) is Verdict.ALIVE
    assert live.verdict(18 * SECOND, 0) is Verdict.DEAD  # a ping at 15 s had 3 s


def test_a_frozen_engine_with_lanes_in_use_is_hung() -> None:
    live = Liveness(LIMITS, 0)

    def seen(second: int, steps: int, busy: int = 1, predicted_ms: int = 40) -> Verdict:
        live.on_status(status(steps, busy, predicted_ms), second * SECOND)
        return live.verdict(second * SECOND, 1)

    assert seen(0, 7, busy=0) is Verdict.ALIVE
    assert seen(60, 7) is Verdict.ALIVE  # it was idle, not frozen
    assert seen(64, 7) is Verdict.ALIVE
    assert seen(65, 7) is Verdict.HUNG
    assert seen(66, 8) is Verdict.ALIVE
    assert seen(71, 8, predicted_ms=3000) is Verdict.ALIVE  # a step of 3 s may take 12
    assert seen(78, 8, predicted_ms=3000) is Verdict.HUNG
    assert seen(79, 8, busy=0) is Verdict.ALIVE


def test_a_pause_of_ours_is_noticed_and_forgiven() -> None:
    pause = OwnPause(LIMITS, 0)
    pause.expect(250 * MS)
    assert [pause.has_paused(now * MS) for now in (1250, 1251)] == [False, True]
    live = Liveness(LIMITS, 0)
    assert live.verdict(0, 1) is Verdict.ALIVE
    live.forgive(60 * SECOND, 60 * SECOND)
    assert live.verdict(60 * SECOND, 1) is Verdict.ALIVE
    assert live.verdict(63 * SECOND, 1) is Verdict.DEAD


def test_pauses_of_ours_do_not_keep_a_dead_node_alive() -> None:
    # each pause once began the three seconds anew: a head short of time found a frozen node out after eleven
    live = Liveness(LIMITS, 0)
    assert live.verdict(0, 1) is Verdict.ALIVE
    verdicts = []
    for awake_s in range(1, 5):
        now_ns = (3 * awake_s) * SECOND  # a second awake, two asleep
        live.forgive(2 * SECOND, now_ns)
        verdicts.append(live.verdict(now_ns, 1))
    assert verdicts == [Verdict.SUSPECT, Verdict.SUSPECT, Verdict.SUSPECT, Verdict.SUSPECT]
    assert live.verdict(13 * SECOND, 1) is Verdict.DEAD


def test_after_a_pause_of_ours_everyone_has_a_moment_to_be_heard() -> None:
    live = Liveness(LIMITS, 0)
    assert live.verdict(0, 1) is Verdict.ALIVE
    live.forgive(2 * SECOND, 4_900 * MS)  # it was silent for 2.9 s before
    assert live.verdict(4_900 * MS, 1) is Verdict.SUSPECT
    assert live.verdict(5_800 * MS, 1) is Verdict.SUSPECT
    live.on_bytes(5_850 * MS)
    assert live.verdict(5_900 * MS, 1) is Verdict.ALIVE


# --- the timer of a link --------------------------------------------------------------------------


def test_a_head_pings_when_either_direction_is_quiet() -> None:
    watch = Watch(Role.HEAD, LIMITS, 0)
    assert watch.next_ping(14 * SECOND) is None
    watch.last_received_ns = 14 * SECOND  # the node talks, but has not heard from us
    assert watch.next_ping(15 * SECOND) == 1
    assert watch.next_ping(16 * SECOND) is None
    watch.on_pong(7, 18 * SECOND)  # no ping of ours
    watch.on_pong(1, 16 * SECOND)
    assert watch.round_trip_ns == SECOND
    watch.stay_below(9000)
    watch.last_sent_ns = watch.last_received_ns = 17 * SECOND
    assert watch.due_ns() == 20 * SECOND
    assert not watch.is_idle(10**15)


def test_a_node_drops_an_idle_head_but_not_for_its_own_sleep() -> None:
    watch = Watch(Role.NODE, LIMITS, 0)
    assert watch.next_ping(10**15) is None
    assert not watch.is_idle(119 * SECOND)
    assert watch.is_idle(120 * SECOND)
    assert watch.has_slept(120 * SECOND, 122 * SECOND)
    watch.forgive(122 * SECOND)
    assert not watch.is_idle(122 * SECOND)
    assert watch.is_idle(242 * SECOND)


def test_a_flood_of_pings_is_not_answered() -> None:
    watch = Watch(Role.NODE, LIMITS, 0)
    assert sum(watch.may_answer(0) for _ in range(50)) == 10
    assert sum(watch.may_answer(3 * SECOND) for _ in range(50)) == 3


# --- queues ---------------------------------------------------------------------------------------


def test_purging_takes_a_placement_out_of_the_queue_row_by_row() -> None:
    outbox = Outbox()
    ours, other, older = (
        m.TokenRow(1, 2, 0, (5,)),
        m.TokenRow(9, 2, 0, (6,)),
        m.TokenRow(1, 1, 0, (7,)),
    )
    outbox.push(m.Tokens((ours, other, older)))
    outbox.push(m.Tokens((ours,)))
    outbox.push(m.ProgressReport(1, 2, 1, 2, 0))
    outbox.push(m.Goaway("x"))
    outbox.push(m.Closed(1, 1, m.CloseReason.FENCED))
    assert outbox.purge(1, 2) == 3
    assert len(outbox) == 3
    assert outbox.pop() == m.Tokens((other, older))
    assert outbox.pop() == m.Goaway("x")
    assert outbox.pop() == m.Closed(1, 1, m.CloseReason.FENCED)
    assert outbox.bytes == 0


def test_finished_rows_are_purged_too() -> None:
    outbox = Outbox()
    outbox.push(m.Tokens((m.TokenRow(1, 2, 0, (5,), FinishReason.STOP, 5),)))
    assert outbox.purge(1, 3) == 0
    assert outbox.purge(1, 2) == 1
    outbox.push(m.Ping(1))
    outbox.clear()
    assert (len(outbox), outbox.bytes) == (0, 0)


def test_the_inbox_is_full_by_messages_or_by_bytes_and_has_room_at_half() -> None:
    inbox = Inbox()
    for _ in range(MESSAGES_MAX):
        inbox.push(m.Ping(1))
    was_full = inbox.is_full
    inbox.push(m.Ping(1))
    assert (was_full, inbox.is_full) == (False, True)
    while not inbox.has_room:
        inbox.pop()
    assert len(inbox) == MESSAGES_MAX // 2
    inbox.push(m.Stats(1, 0, 1, bytes(BYTES_MAX)))
    assert inbox.is_full
