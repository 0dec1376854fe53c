"""The pool: free, held and idle always add up, and misuse is noticed."""

from __future__ import annotations

import pytest

from superfluid_core.kv.blocks import BlockPool, PoolShape


def test_a_block_is_free_again_after_its_last_holder_let_go() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    assert not pool.retain(block)
    assert not pool.release(block)
    assert pool.release(block)
    assert pool.free == 1
    pool.give_back(block)
    assert pool.free == 2


def test_retaining_an_idle_block_says_so() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    assert pool.retain(block)


def test_releasing_too_often_is_a_broken_invariant() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError):
        pool.release(block)


def test_giving_back_a_held_block_is_a_broken_invariant() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    with pytest.raises(AssertionError):
        pool.give_back(block)


def test_the_longest_context_is_bounded_by_window_and_pool() -> None:
    assert PoolShape(16, 10, 100).context_max == 100
    assert PoolShape(16, 10, 4096).context_max == 161
