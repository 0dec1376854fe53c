"""Pins: within the budget, for their time, by head; and over the link of a live node."""

from __future__ import annotations

from functools import partial

from superfluid_core.blockhash import block_chain, root_hash
from superfluid_core.clock import SECOND
from superfluid_core.wire.messages import Embed, Pin, Unpin
from superfluid_noded.pins import Pins
from tests.unit.noded.conftest import KEYS, NodeRig, check


class FakeCache:
    """Remembers who is pinned among the names that are here."""

    def __init__(self, names: int) -> None:
        self.names = [bytes([n]) * 16 for n in range(names)]
        self.pinned: set[bytes] = set()

    def pin_prefix(self, name: bytes, *, pinned: bool) -> bool:
        if name not in self.names:
            return False
        (self.pinned.add if pinned else self.pinned.discard)(name)
        return True

    def prefix_names(self) -> list[bytes]:
        return self.names


def test_the_front_of_a_prefix_is_kept_within_the_budget_and_the_rest_is_counted() -> None:
    cache = FakeCache(8)
    pins = Pins(cache, 3)
    assert pins.pin("h", cache.names[:5], 1_000, 0) == 3
    assert cache.pinned == set(cache.names[:3])
    assert (pins.blocks, pins.refused) == (3, 2)
    assert pins.pin("h", cache.names[:2], 1_000, 0) == 2


def test_a_chain_ends_at_its_first_absent_block() -> None:
    cache = FakeCache(4)
    pins = Pins(cache, 10)
    assert pins.pin("h", [cache.names[0], b"?" * 16, cache.names[1]], 1_000, 0) == 1
    assert cache.pinned == {cache.names[0]}


def test_a_pin_ends_with_its_time_and_a_newer_one_extends_it() -> None:
    cache = FakeCache(4)
    pins = Pins(cache, 10)
    pins.pin("h", cache.names[:2], 1_000, 0)
    pins.pin("h", cache.names[:1], 5_000, 0)
    assert pins.seconds_to_next_end(0) == 1
    pins.expire(SECOND)
    assert cache.pinned == {cache.names[0]}
    pins.expire(5 * SECOND)
    assert cache.pinned == set()
    assert pins.blocks == 0
    assert pins.seconds_to_next_end(5 * SECOND) == 0


def test_one_head_cannot_take_away_what_another_wants() -> None:
    cache = FakeCache(4)
    pins = Pins(cache, 10)
    pins.pin("a", cache.names, 1_000, 0)
    pins.pin("b", cache.names, 1_000, 0)
    pins.unpin("a", cache.names)
    pins.unpin("stranger", cache.names)
    assert cache.pinned == set(cache.names)
    pins.unpin("b", cache.names)
    assert cache.pinned == set()


def test_what_pressure_took_makes_room_in_the_budget() -> None:
    cache = FakeCache(4)
    pins = Pins(cache, 2)
    pins.pin("h", cache.names[:2], 1_000, 0)
    del cache.names[0]
    assert pins.pin("h", [cache.names[1]], 1_000, 0) == 1
    assert pins.blocks == 2


def test_many_renewals_do_not_grow_the_table() -> None:
    cache = FakeCache(4)
    pins = Pins(cache, 10)
    for turn in range(1_000):
        pins.pin("h", cache.names, 60_000, turn)
    assert len(pins._ends) <= 2 * 4 + 64 + 1


def test_a_pinned_prefix_outlives_what_pushes_everything_else_out() -> None:
    kept, other = tuple(range(64)), tuple(range(100, 164))

    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, prompt=kept, max_output=1)
        head.open(2, prompt=other, max_output=1)
        await head.until(lambda: head.is_finished(1) and head.is_finished(2))
        root = root_hash(KEYS.prefix_salt, tenant="t")
        names = tuple(block_chain(root, kept, 16))
        assert set(names) <= set(rig.node.scheduler.prefix_names())
        head.link.send(Pin(names, 60_000, "alias"))
        await rig.until(lambda: rig.node.pins[0].blocks == 4)
        for session in range(3, 13):
            head.open(session, prompt=tuple(range(session * 50, session * 50 + 160)), max_output=1)
            await head.until(partial(head.is_finished, session))
        here = set(rig.node.scheduler.prefix_names())
        assert set(names) <= here
        assert not set(block_chain(root, other, 16)) & here
        assert rig.node.figures()["pins"]["m"]["blocks"] == 4
        head.link.send(Unpin(names, "m"))
        await rig.until(lambda: rig.node.pins[0].blocks == 0)

    check(body, blocks=32)


def test_each_model_has_pins_of_its_own_within_a_share_of_its_own_pool() -> None:
    """The same tokens have the same name in both caches: the pin says whose cache it means."""
    prompt = tuple(range(64))

    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        for session, model in enumerate(("m", "fim"), 1):
            head.open(session, model=model, prompt=prompt, max_output=1)
        await head.until(lambda: head.is_finished(1) and head.is_finished(2))
        names = tuple(block_chain(root_hash(KEYS.prefix_salt, tenant="t"), prompt, 16))
        main, fim = rig.node.pins
        head.link.send(Pin(names, 60_000, "fim"))
        await rig.until(lambda: fim.blocks == 4)
        assert main.blocks == 0
        assert (main.budget, fim.budget) == (256, 32)
        told = rig.node.figures()["pins"]
        assert (told["m"]["blocks"], told["alias"]["blocks"], told["fim"]["blocks"]) == (0, 0, 4)
        head.link.send(Unpin(names, "m"))
        head.link.send(Unpin(names[:1], "fim"))
        await rig.until(lambda: fim.blocks == 3)
        head.link.send(Pin(names, 60_000, "other"))
        await rig.until(lambda: not rig.node.agent.roster.heads)

    check(body, fim={"lanes": 2, "window": 256, "blocks": 64, "eos_probability": 0.0})


def test_a_pooling_nobody_knows_is_refused_by_session_and_the_link_stays() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.link.send(Embed(7, "m", "median", (1, 2)))
        await head.until(lambda: head.refused(7))
        refused = head.refused(7)
        assert refused is not None
        assert refused.code.value == "unsupported_value"
        head.open(8)
        await head.until(lambda: head.is_finished(8))

    check(body)
