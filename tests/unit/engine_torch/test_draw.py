"""Filters and draw against a definition written out with Python floats, one row at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.engine.torch import draw as module
from superfluid_core.engine.torch.draw import TOP_K_OFF, DrawColumns, best_first, draw


@dataclass(frozen=True)
class Wish:
    temperature: float = 1.0
    top_k: int = TOP_K_OFF
    min_p: float = 0.0
    top_p: float = 1.0

    @property
    def is_filtered(self) -> bool:
        return self.top_k != TOP_K_OFF or self.min_p > 0 or self.top_p < 1


def columns(wishes: list[Wish]) -> DrawColumns:
    filtered = [n for n, wish in enumerate(wishes) if wish.is_filtered]
    plain = [n for n, wish in enumerate(wishes) if not wish.is_filtered]
    return DrawColumns(
        temperature=torch.tensor([wish.temperature for wish in wishes]),
        top_k=torch.tensor([wish.top_k for wish in wishes]),
        min_p=torch.tensor([wish.min_p for wish in wishes], dtype=torch.float64),
        top_p=torch.tensor([wish.top_p for wish in wishes], dtype=torch.float64),
        plain=torch.tensor(plain) if plain else None,
        filtered=torch.tensor(filtered) if filtered else None,
        unbounded=any(w.is_filtered and w.top_k == TOP_K_OFF and w.min_p <= 0 for w in wishes),
    )


def kept_ids(logits: list[float], wish: Wish) -> tuple[list[int], list[float]]:
    """Ids that survive, in the order of the CDF, with their weights."""
    scaled = [value / wish.temperature for value in logits]
    best = max(scaled)
    weights = [math.exp(value - best) for value in scaled]
    ids = list(range(len(logits)))
    if not wish.is_filtered:
        return ids, weights
    ids.sort(key=lambda token: (-scaled[token], token))
    ids = ids[: wish.top_k]
    ids = [token for token in ids if weights[token] >= wish.min_p] or ids[:1]
    total = sum(weights[token] for token in ids)
    kept: list[int] = []
    before = 0.0
    for token in ids:
        if before < wish.top_p * total or not kept:
            kept.append(token)
        before += weights[token]
    return kept, [weights[token] for token in kept]


def expected_id(logits: list[float], wish: Wish, uniform: float) -> int:
    ids, weights = kept_ids(logits, wish)
    target = uniform * sum(weights)
    for token, weight in zip(ids, weights, strict=True):
        target -= weight
        if target < 0:
            return token
    return ids[-1]


WISHES = [
    Wish(),
    Wish(temperature=0.7, top_p=0.9),
    Wish(top_k=5),
    Wish(top_k=50, top_p=0.8, min_p=0.02),
    Wish(temperature=3.0, top_p=0.999),
    Wish(temperature=2.0, min_p=0.001),
    Wish(top_k=100),
    Wish(top_p=0.0),
    Wish(min_p=1.0),
    Wish(temperature=1.5, top_k=200, top_p=0.95),
]


@pytest.mark.parametrize("vocabulary", [40, 64, 700])
@pytest.mark.parametrize("sharpness", [0.3, 4.0])
def test_every_filter_draws_what_its_definition_says(vocabulary: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(WISHES), vocabulary, generator=generator) * sharpness
    for _ in range(20):
        uniform = torch.rand(len(WISHES), generator=generator, dtype=torch.float64)
        found = draw(logits, columns(WISHES), uniform).tolist()
        for row, wish in enumerate(WISHES):
            assert found[row] == expected_id(logits[row].tolist(), wish, float(uniform[row]))


@pytest.mark.parametrize("seed", range(4))
def test_a_row_draws_the_same_alone_as_in_a_batch_and_by_the_full_sort(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(WISHES), 500, generator=generator).mul(2).bfloat16().float()
    uniform = torch.rand(len(WISHES), generator=generator, dtype=torch.float64)
    together = draw(logits, columns(WISHES), uniform).tolist()
    alone = [
        int(draw(logits[n : n + 1], columns([wish]), uniform[n : n + 1]))
        for n, wish in enumerate(WISHES)
    ]
    assert alone == together
    monkeypatch.setattr(module, "CANDIDATES", 500)
    assert draw(logits, columns(WISHES), uniform).tolist() == together


def test_equal_values_are_ordered_by_the_lowest_id() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 250] = 1.0
    for top_k, expected in ((2, [250, 0]), (3, [250, 0, 1])):
        picks = [
            int(draw(logits, columns([Wish(top_k=top_k)]), torch.tensor([u], dtype=torch.float64)))
            for u in (0.0, 0.9999999)
        ]
        assert picks == [expected[0], expected[-1]]
    values, ids = best_first(logits, 4)
    assert values[0, 0] == 1.0
    assert ids[0, 0] == 250
    assert ids[0, 1:].tolist() == sorted(ids[0, 1:].tolist())


def test_an_id_of_weight_zero_is_never_drawn() -> None:
    logits = torch.full((2, 100), -torch.inf)
    logits[:, 7] = 0.0
    logits[:, 70] = 0.0
    wishes = [Wish(), Wish(top_p=0.5 + 1e-9)]
    for u in (0.0, 0.4999, 0.5, 0.75, 1.0 - 2**-53):
        found = draw(logits, columns(wishes), torch.tensor([u, u], dtype=torch.float64))
        assert set(found.tolist()) <= {7, 70}


@given(
    temperature=st.floats(0.05, 5.0),
    top_k=st.one_of(st.just(TOP_K_OFF), st.integers(1, 120)),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_any_parameters_keep_only_ids_that_their_definition_keeps(
    temperature: float, top_k: int, min_p: float, top_p: float, seed: int
) -> None:
    wish = Wish(temperature, top_k, min_p, top_p)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 150, generator=generator) * 2
    uniform = torch.rand(1, generator=generator, dtype=torch.float64)
    found = int(draw(logits, columns([wish]), uniform))
    ids, _ = kept_ids(logits[0].tolist(), wish)
    near = kept_ids(logits[0].tolist(), Wish(temperature, top_k, min_p * 0.9999, top_p * 1.0001))
    assert found in set(ids) | set(near[0])


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5]]).repeat(4000, 1)
    uniform = torch.rand(4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for wish in (Wish(), Wish(top_k=3), Wish(temperature=2.0, top_p=0.9)):
        ids, weights = kept_ids(logits[0].tolist(), wish)
        found = draw(logits, columns([wish] * 4000), uniform).bincount(minlength=5)
        for token, weight in zip(ids, weights, strict=True):
            share = weight / sum(weights)
            spread = math.sqrt(4000 * share * (1 - share)) + 1e-9
            assert abs(int(found[token]) - 4000 * share) < 5 * spread
        assert int(found.sum()) == sum(int(found[token]) for token in ids)
