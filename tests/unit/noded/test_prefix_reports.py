"""What heads are told of the prefix cache: checked against the head's own index and the names that it makes itself."""

from __future__ import annotations

import asyncio
from typing import Any

from superfluid_core.blockhash import block_chain, root_hash
from superfluid_core.clock import SystemClock
from superfluid_core.kv.prefix import PrefixChanges
from superfluid_core.limits import LinkLimits
from superfluid_core.link.dial import dial
from superfluid_core.placement.prefix import PrefixIndex
from superfluid_core.wire.messages import MINOR, Hello, Prefix
from superfluid_noded.prefix_reports import PENDING_MAX, PrefixReports
from tests.unit.noded.conftest import KEYS, NodeRig, check


class Transport:
    waiting = 0

    def get_write_buffer_size(self) -> int:
        return self.waiting


class FakeLink:
    is_open = True

    def __init__(self, *features: str) -> None:
        self.peer = Hello(MINOR, features, "head")
        self.transport = Transport()
        self.sent: list[Prefix] = []

    def send(self, message: Prefix) -> None:
        self.sent.append(message)


class FakeHead:
    def __init__(self, *features: str) -> None:
        self.link = FakeLink(*features)


class FakeRoster:
    def __init__(self, **heads: FakeHead) -> None:
        self.heads = dict(enumerate(heads.values()))

    def send(self, head: FakeHead, messages: Any) -> None:
        for message in messages:
            head.link.send(message)


class FakeCache:
    """Names that the test adds and removes."""

    def __init__(self) -> None:
        self.names: dict[bytes, None] = {}
        self.changes = PrefixChanges([], [])

    def change(self, added: Any = (), removed: Any = ()) -> None:
        self.names.update(dict.fromkeys(added))
        for name in removed:
            del self.names[name]
        self.changes.added.extend(added)
        self.changes.removed.extend(removed)

    def prefix_names(self) -> list[bytes]:
        return list(self.names)

    def drain_prefix_changes(self) -> PrefixChanges:
        changes, self.changes = self.changes, PrefixChanges([], [])
        return changes


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def turn(reports: PrefixReports) -> None:
    reports.report()
    reports.send()


def told(head: FakeHead, count: int = 10_000) -> int:
    """How many blocks a head knows of by what it was sent."""
    index = PrefixIndex()
    index.attach("node", count)
    for report in head.link.sent:
        assert index.fold("node", report)
    return index.blocks("node")


def test_each_link_gets_a_snapshot_and_then_every_change_once() -> None:
    early, late, deaf = FakeHead("prefix"), FakeHead("prefix"), FakeHead("files")
    roster, cache = FakeRoster(early=early, deaf=deaf), FakeCache()
    reports: Any = PrefixReports([cache], roster)  # type: ignore[arg-type]
    cache.change([name(1), name(2)])
    turn(reports)
    roster.heads[7] = late
    cache.change([name(3)], [name(1)])
    turn(reports)
    turn(reports)
    assert [report.snapshot for report in early.link.sent] == [True, False]
    assert [report.snapshot for report in late.link.sent] == [True]
    assert told(early) == told(late) == 2
    assert deaf.link.sent == []


def test_a_large_snapshot_leaves_in_pieces_and_only_while_nothing_else_waits() -> None:
    head, cache = FakeHead("prefix"), FakeCache()
    reports: Any = PrefixReports([cache], FakeRoster(head=head))  # type: ignore[arg-type]
    cache.change([name(number) for number in range(10_000)])
    head.link.transport.waiting = 1 << 20
    turn(reports)
    assert head.link.sent == []
    head.link.transport.waiting = 0
    reports.send()
    assert len(head.link.sent) == 3
    assert told(head) == 10_000


def test_a_link_that_does_not_keep_up_gets_a_new_snapshot_and_bounded_memory() -> None:
    head, cache = FakeHead("prefix"), FakeCache()
    reports: Any = PrefixReports([cache], FakeRoster(head=head))  # type: ignore[arg-type]
    turn(reports)
    head.link.transport.waiting = 1 << 20
    for number in range(3 * PENDING_MAX):
        cache.change([name(number)])
        turn(reports)
    assert sum(len(told.pending) for each in reports._told.values() for told in each) == PENDING_MAX
    head.link.transport.waiting = 0
    reports.send()
    turn(reports)
    assert head.link.sent[-1].snapshot
    assert told(head) == 3 * PENDING_MAX


def test_each_engine_has_reports_and_a_sequence_of_its_own() -> None:
    head, main, fim = FakeHead("prefix"), FakeCache(), FakeCache()
    reports: Any = PrefixReports([main, fim], FakeRoster(head=head))  # type: ignore[arg-type]
    main.change([name(1)])
    turn(reports)
    fim.change([name(1), name(2)])
    turn(reports)
    fim.change([], [name(1)])
    turn(reports)
    sent = [(each.engine, each.sequence, each.snapshot) for each in head.link.sent]
    assert sent == [(0, 1, True), (1, 1, True), (1, 2, False), (1, 3, False)]


def test_a_link_that_is_gone_is_forgotten() -> None:
    head, cache = FakeHead("prefix"), FakeCache()
    roster = FakeRoster(head=head)
    reports: Any = PrefixReports([cache], roster)  # type: ignore[arg-type]
    turn(reports)
    roster.heads.clear()
    turn(reports)
    assert not reports._told


def test_a_real_node_reports_the_names_that_a_head_makes_for_the_same_prompt() -> None:
    prompt = tuple(range(32, 32 + 90))

    async def body(rig: NodeRig) -> None:
        reports = PrefixReports([rig.node.scheduler], rig.node.agent.roster)
        hello = Hello(MINOR, ("prefix",), "head-9")
        link = await dial(
            "127.0.0.1",
            rig.port,
            keys=KEYS,
            hello=hello,
            limits=LinkLimits(),
            clock=SystemClock(),
        )
        index = PrefixIndex()
        index.attach("node-1", 512)
        end = await rig.link()
        turn(reports)
        end.open(prompt=prompt, tenant="acme", max_output=4)
        await end.until(end.is_finished)
        turn(reports)
        root = root_hash(KEYS.prefix_salt, tenant="acme")
        chain = block_chain(root, prompt, 16)
        while index.depths(chain).get("node-1", 0) < len(chain):
            async with asyncio.timeout(5):
                message = await link.receive()
            if isinstance(message, Prefix):
                assert index.fold("node-1", message)
        assert index.depths(chain) == {"node-1": 5}
        await link.close("done")
        await rig.until(lambda: len(rig.node.agent.roster.heads) == 1)

    check(body)
