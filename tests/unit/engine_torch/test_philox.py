"""Philox 4x32-10 against the published vectors, and what sampling makes of it."""

from __future__ import annotations

import pytest
import torch

from superfluid_core.engine.torch.philox import philox, uniforms

# counter, key, output: the known answers of the Random123 distribution, philox4x32 with 10 rounds
VECTORS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_the_published_vectors_come_out(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = tuple(torch.tensor([word]) for word in counter)
    low, high = (torch.tensor([word]) for word in key)
    found = philox(words, (low, high))
    assert tuple(int(word.item()) for word in found) == expected


def test_draws_depend_on_seed_choice_and_index_alone() -> None:
    seeds, choices = [7, 2**64 - 1, 7], [0, 3, 1]
    together = uniforms(seeds, choices, [0, 0, 0], 40)
    for row, (seed, choice) in enumerate(zip(seeds, choices, strict=True)):
        for index in (0, 1, 39):
            assert uniforms([seed], [choice], [index], 1)[0, 0] == together[row, index]
    assert len(set(together.flatten().tolist())) == together.numel()


def test_draws_are_uniform_in_the_unit_interval() -> None:
    drawn = uniforms([12345], [0], [0], 20_000)[0]
    assert float(drawn.min()) >= 0.0
    assert float(drawn.max()) < 1.0
    counts = torch.histc(drawn.float(), bins=20, min=0.0, max=1.0)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # chi-square, 19 degrees, p = 0.001
