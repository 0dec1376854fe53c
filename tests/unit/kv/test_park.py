"""The accounts of host memory: who may stay, who goes, and which moves the next plan carries."""

from __future__ import annotations

from superfluid_core.kv.blocks import BlockPool
from superfluid_core.kv.park import NO_MOVES, Moves, ParkStore
from superfluid_core.kv.prefix import PrefixCache

ROOT = b"r" * 16


def name(number: int) -> bytes:
    return bytes([number]) * 16


def keep(store: ParkStore, *numbers: int) -> None:
    for number in numbers:
        store.keep_prefix(name(number), ROOT, (number,), number)


def held(store: ParkStore) -> list[int]:
    return [n for n in range(20) if store.holds(name(n), ROOT, (n,))]


def test_a_session_goes_out_with_one_plan_and_comes_in_with_another() -> None:
    store = ParkStore(4)
    ticket = store.keep([7, 8, 9])
    assert ticket == 1
    assert store.drain() == Moves((), ((1, (7, 8, 9)),), ())
    store.landed()
    assert (store.blocks, store.sessions) == (3, 1)
    store.restore(1, [2, 3])
    assert store.drain() == Moves((), (), ((1, (2, 3)),))
    assert store.blocks == 3, "the copy is there until the plan has run"
    store.landed()
    assert (store.blocks, store.sessions) == (0, 0)
    assert store.drain() is NO_MOVES


def test_sessions_push_prefixes_out_least_recently_used_first_and_never_each_other() -> None:
    store = ParkStore(5)
    keep(store, 1, 2, 3)
    keep(store, 1)
    store.drain()
    store.landed()
    assert store.keep([10, 11, 12]) is not None
    assert held(store) == [3, 1] or held(store) == [1, 3]
    assert store.drain().drops == (2,)
    store.landed()
    assert store.keep([13, 14, 15]) is None
    assert store.refused == 1
    assert held(store) == [1, 3], "nothing is dropped where that cannot be enough"


def test_prefixes_never_push_a_session_out() -> None:
    store = ParkStore(2)
    store.keep([1, 2])
    keep(store, 5)
    assert held(store) == []
    assert store.blocks == 2


def test_a_prefix_is_believed_by_its_tokens_and_its_parent_only() -> None:
    store = ParkStore(2)
    keep(store, 5)
    assert store.holds(name(5), ROOT, (5,))
    assert not store.holds(name(5), ROOT, (6,))
    assert not store.holds(name(5), name(1), (5,))
    store.keep_prefix(name(5), ROOT, (6,), 9)
    assert store.holds(name(5), ROOT, (5,))


def test_what_no_plan_carried_yet_is_not_moved_when_it_is_given_up() -> None:
    store = ParkStore(4)
    ticket = store.keep([1, 2])
    assert ticket is not None
    store.give_up(ticket)
    keep(store, 5)
    assert store.drop_prefixes() == 1
    assert store.drain() is NO_MOVES
    assert store.blocks == 0


def test_a_refused_plan_gives_its_moves_back_but_only_those_still_wanted() -> None:
    store = ParkStore(9)
    first, second = store.keep([1]), store.keep([2])
    assert first is not None
    assert second is not None
    store.drain()
    store.landed()
    store.restore(first, [5])
    store.restore(second, [6])
    third = store.keep([3])
    fourth = store.keep([4])
    assert third is not None
    assert fourth is not None
    flight = store.drain()
    store.give_up(fourth)
    store.refuse({first})
    again = store.drain()
    assert again.ins == flight.ins[:1]
    assert again.outs == flight.outs[:1]
    assert again.drops == (second,)
    store.landed()
    assert store.blocks == 1


def test_an_in_that_is_called_off_is_dropped() -> None:
    store = ParkStore(4)
    ticket = store.keep([1, 2])
    assert ticket is not None
    store.drain()
    store.landed()
    store.restore(ticket, [5, 6])
    store.call_off([ticket])
    assert store.drain() == Moves((ticket,), (), ())
    assert store.blocks == 0


def test_nothing_moves_into_a_closed_store() -> None:
    store = ParkStore(4)
    store.is_open = False
    keep(store, 5)
    assert store.keep([1]) is None
    assert (store.refused, store.blocks) == (0, 0)


def test_an_evicted_block_goes_to_the_host_and_a_withdrawn_one_never() -> None:
    pool = BlockPool(2)
    store = ParkStore(4)
    cache = PrefixCache(pool, store)
    for number in (1, 2):
        block = cache.allocate()
        cache.publish(name(number), None, ROOT, (number,), block)
        cache.drop(block)
    cache.evict_one()
    assert held(store) == [1]
    found = cache.find(name(2), ROOT, (2,))
    assert found is not None
    cache.withdraw(found)
    assert held(store) == [], "what was computed on top of it could lie there"
    assert pool.free == 2


def test_an_eviction_may_leave_nothing_behind() -> None:
    pool = BlockPool(1)
    store = ParkStore(4)
    cache = PrefixCache(pool, store)
    block = cache.allocate()
    cache.publish(name(1), None, ROOT, (1,), block)
    cache.drop(block)
    assert cache.evict_one(to_host=False)
    assert held(store) == []
