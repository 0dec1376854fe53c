"""Parked KV in pieces on a stream beside the steps: the order of copies and waits, with streams that tell on whoever is early."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from superfluid_core.engine.torch.cuda.park import PIECES_UNDER_WAY, HostStreams, ParkStore

BLOCKS = 40
BLOCK_BYTES = 2 * 1 * 4 * 1 * 8 * 4


class Late:
    """Copies are done when they are waited for, not before; nothing may be read earlier."""

    def __init__(self) -> None:
        self.under_way: set[tuple[str, int]] = set()
        self.most_under_way = 0
        self.copies = 0

    def _begin(self, way: str, finish: Callable[[], None]) -> Callable[[], None]:
        number, self.copies = (way, self.copies), self.copies + 1
        self.under_way.add(number)
        alike = sum(1 for other, _ in self.under_way if other == way)
        self.most_under_way = max(self.most_under_way, alike)

        def wait() -> None:
            if number in self.under_way:
                self.under_way.discard(number)
                finish()

        return wait

    def to_host(self, piece: Tensor) -> tuple[Tensor, Callable[[], None]]:
        host = torch.full_like(piece, float("nan"))
        kept = piece.clone()  # in order of the main stream, whatever is written there afterwards

        def finish() -> None:
            host.copy_(kept)

        return host, self._begin("out", finish)

    def to_device(self, piece: Tensor) -> tuple[Tensor, Callable[[], None]]:
        assert not bool(piece.isnan().any()), "read before it had arrived"
        return piece.clone(), self._begin("in", lambda: None)


class Pool:
    def __init__(self) -> None:
        self.slab = torch.randn(1, 2, BLOCKS, 4, 1, 8)

    def gather(self, blocks: Sequence[int]) -> Tensor:
        return self.slab.index_select(2, torch.tensor(list(blocks)))

    def scatter(self, blocks: Sequence[int], piece: Tensor) -> None:
        self.slab.index_copy_(2, torch.tensor(list(blocks)), piece)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superfluid_core.engine.torch.cuda.park.PIECE_BYTES", 3 * BLOCK_BYTES)


def store(pool: Pool, streams: Late | HostStreams) -> ParkStore:
    return ParkStore(BLOCK_BYTES, pool.gather, pool.scatter, streams)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("count", [1, 3, 4, 16])
def test_blocks_come_back_in_order_wherever_they_go(count: int) -> None:
    pool, streams = Pool(), Late()
    kept = store(pool, streams)
    out, back = list(range(count)), list(range(BLOCKS - 1, BLOCKS - 1 - count, -1))
    before = pool.gather(out)
    kept.put(1, out)
    pool.slab[:, :, :count] = -1.0
    assert kept.counts() == {1: count}
    kept.take(1, back)
    assert torch.equal(pool.gather(back), before)
    assert kept.counts() == {}
    assert streams.most_under_way <= PIECES_UNDER_WAY


@pytest.mark.usefixtures("small_pieces")
def test_the_first_blocks_alone_may_come_back() -> None:
    pool = Pool()
    kept = store(pool, Late())
    before = pool.gather(range(10))
    kept.put(1, range(10))
    kept.take(1, [20, 30, 25, 21])
    assert torch.equal(pool.gather([20, 30, 25, 21]), before[:, :, :4])


@pytest.mark.usefixtures("small_pieces")
def test_dropping_forgets_and_may_be_said_twice() -> None:
    pool, streams = Pool(), Late()
    kept = store(pool, streams)
    kept.put(1, range(5))
    kept.put(2, range(7))
    kept.drop(1)
    kept.drop(1)
    assert kept.counts() == {2: 7}


def test_on_the_host_the_gathered_copy_is_what_is_kept() -> None:
    pool = Pool()
    kept = store(pool, HostStreams())
    before = pool.gather([4, 2])
    kept.put(9, [4, 2])
    pool.slab.zero_()
    kept.take(9, [0, 1])
    assert torch.equal(pool.gather([0, 1]), before)
