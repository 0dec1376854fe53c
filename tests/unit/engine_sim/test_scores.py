"""Scores of texts on the wire and of the engine that invents them: what is packed is read, what is broken is refused."""

from __future__ import annotations

import math

import pytest

from superfluid_core.engine.scores import BEST_MAX, best_of, pack_scores, scoring, unpack_scores
from superfluid_core.engine.stand_ins import hashed_scores
from superfluid_core.errors import RemoteProtocolError
from superfluid_core.session import TokenLogprobs


def test_what_is_wanted_has_a_name_that_nothing_else_has() -> None:
    assert [best_of(scoring(best)) for best in (0, 7, BEST_MAX)] == [0, 7, BEST_MAX]
    for name in ("mean", "logprobs-", "logprobs-21", "logprobs--1", "logprobs-x", "logprobs-007", "5"):  # fmt: skip
        assert best_of(name) is None


@pytest.mark.parametrize("best", [0, 1, 5])
def test_what_is_packed_is_read_again(best: int) -> None:
    rows = [TokenLogprobs(-0.5 * row, tuple((row + n, -1.0 * n) for n in range(best))) for row in range(4)]  # fmt: skip
    assert unpack_scores(pack_scores(rows), 5) == rows


@pytest.mark.parametrize("size", [0, 1, 3, 12, 16 + 4, 16 + 8 * 4 * 21])
def test_scores_of_another_number_of_tokens_are_refused(size: int) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_scores(bytes(size), 5)


def test_invented_scores_are_ordered_finite_and_the_same_again() -> None:
    data = hashed_scores([5, 6, 7, 7], 3, 1, 300)
    assert data == hashed_scores([5, 6, 7, 7], 3, 1, 300)
    assert data != hashed_scores([5, 6, 7, 7], 3, 2, 300)
    rows = unpack_scores(data, 4)
    assert [row.top[0][0] for row in rows] == [6, 7, 7]
    for row in rows:
        values = [value for _, value in row.top]
        assert values == sorted(values, reverse=True)
        assert all(math.isfinite(value) and value < 0 for value in (row.logprob, *values))
