"""The prefix cache: found by tokens, forgotten leaf first, never while held."""

from __future__ import annotations

from superfluid_core.blockhash import block_hash, root_hash
from superfluid_core.kv.blocks import BlockPool
from superfluid_core.kv.prefix import PrefixCache

ROOT = root_hash(b"")


class Holder:
    """Publishes a chain of one-token blocks and lets go of it."""

    def __init__(self, cache: PrefixCache, tokens: str) -> None:
        self.cache = cache
        self.names: list[bytes] = []
        self.blocks: list[int] = []
        parent, above = ROOT, None
        for letter in tokens:
            name = block_hash(parent, [ord(letter)])
            found = cache.find(name, parent, (ord(letter),))
            if found is None:
                block = cache.allocate()
                assert cache.publish(name, above, parent, (ord(letter),), block) == block
            else:
                block = found
                cache.take(block)
            self.names.append(name)
            self.blocks.append(block)
            parent, above = name, block

    def drop(self) -> None:
        for block in reversed(self.blocks):
            self.cache.drop(block)


def known(cache: PrefixCache, holder: Holder) -> int:
    return sum(name in set(cache.names()) for name in holder.names)


def test_a_released_chain_stays_findable_and_costs_nothing_to_take_again() -> None:
    cache = PrefixCache(BlockPool(8))
    Holder(cache, "abc").drop()
    assert (cache.idle, cache.reachable) == (3, 8)
    again = Holder(cache, "abd")
    assert (cache.idle, len(cache)) == (1, 4)
    again.drop()
    assert cache.reachable == 8


def test_a_find_is_verified_by_tokens_and_parent_not_by_the_hash_alone() -> None:
    cache = PrefixCache(BlockPool(4))
    block = cache.allocate()
    cache.publish(b"n" * 16, None, ROOT, (1, 2), block)
    assert cache.find(b"n" * 16, ROOT, (1, 2)) == block
    assert cache.find(b"n" * 16, ROOT, (1, 3)) is None
    assert cache.find(b"n" * 16, b"p" * 16, (1, 2)) is None


def test_a_block_whose_name_is_taken_by_other_tokens_stays_private() -> None:
    cache = PrefixCache(BlockPool(4))
    first, second = cache.allocate(), cache.allocate()
    cache.publish(b"n" * 16, None, ROOT, (1,), first)
    assert cache.publish(b"n" * 16, None, ROOT, (2,), second) is None
    cache.drop(second)
    assert (cache.idle, cache.reachable) == (0, 3)


def test_who_publishes_second_is_told_the_first_block() -> None:
    cache = PrefixCache(BlockPool(4))
    first, second = cache.allocate(), cache.allocate()
    cache.publish(b"n" * 16, None, ROOT, (1,), first)
    assert cache.publish(b"n" * 16, None, ROOT, (1,), second) == first


def test_the_least_recently_used_leaf_goes_first_and_parents_after_their_children() -> None:
    cache = PrefixCache(BlockPool(5))
    old = Holder(cache, "ab")
    new = Holder(cache, "xy")
    old.drop()
    new.drop()
    order: list[bytes] = []
    for _ in range(4):
        before = set(cache.names())
        assert cache.evict_one()
        order.extend(before - set(cache.names()))
    assert order == [old.names[1], old.names[0], new.names[1], new.names[0]]
    assert not cache.evict_one()
    assert cache.reachable == 5


def test_using_a_chain_again_makes_it_young() -> None:
    cache = PrefixCache(BlockPool(4))
    one, two = Holder(cache, "a"), Holder(cache, "b")
    one.drop()
    two.drop()
    Holder(cache, "a").drop()
    cache.evict_one()
    assert (known(cache, one), known(cache, two)) == (1, 0)


def test_a_held_chain_is_never_evicted() -> None:
    cache = PrefixCache(BlockPool(4))
    held = Holder(cache, "ab")
    Holder(cache, "abc").drop()
    assert cache.evict_one()
    assert not cache.evict_one()
    assert known(cache, held) == 2


def test_allocating_from_a_full_pool_evicts() -> None:
    cache = PrefixCache(BlockPool(2))
    Holder(cache, "ab").drop()
    cache.allocate()
    assert (len(cache), cache.evicted) == (1, 1)


def test_pins_yield_last_and_the_oldest_pin_first() -> None:
    cache = PrefixCache(BlockPool(4))
    chains = [Holder(cache, letter) for letter in "abc"]
    for chain in chains:
        chain.drop()
    assert cache.pin(chains[0].names[0])
    assert cache.pin(chains[1].names[0])
    assert not cache.pin(b"?" * 16)
    left = []
    for _ in range(3):
        cache.evict_one()
        left.append([known(cache, chain) for chain in chains])
    assert left == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]


def test_an_unpinned_block_is_like_any_other() -> None:
    cache = PrefixCache(BlockPool(4))
    one, two = Holder(cache, "a"), Holder(cache, "b")
    one.drop()
    cache.pin(one.names[0])
    cache.unpin(one.names[0])
    two.drop()
    cache.evict_one()
    assert (known(cache, one), known(cache, two)) == (0, 1)


def test_withdrawing_takes_everything_computed_on_top_along() -> None:
    cache = PrefixCache(BlockPool(8))
    holder = Holder(cache, "abc")
    Holder(cache, "abx").drop()
    cache.withdraw(holder.blocks[1])
    assert len(cache) == 1
    assert (
        cache.publish(b"n" * 16, holder.blocks[1], holder.names[1], (9,), cache.allocate()) is None
    )
    holder.drop()
    assert (cache.idle, cache.reachable) == (1, 7)


def test_changes_since_the_last_look_are_told_and_cancel_out() -> None:
    cache = PrefixCache(BlockPool(4))
    one = Holder(cache, "a")
    one.drop()
    assert cache.drain_changes().added == one.names
    two = Holder(cache, "b")
    two.drop()
    cache.evict_one()
    cache.evict_one()
    assert cache.drain_changes() == ([], one.names)


def test_the_list_of_leaves_does_not_grow_with_use() -> None:
    cache = PrefixCache(BlockPool(4))
    for _ in range(1000):
        Holder(cache, "ab").drop()
    assert len(cache._leaves) <= 2 * 4 + 65
    assert cache.evict_one()
    assert cache.evict_one()
    assert not cache.evict_one()
