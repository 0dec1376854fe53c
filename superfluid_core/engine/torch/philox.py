"""Philox 4x32-10: numbers that depend on a key and a counter, and on nothing else.

Owns the noise of sampling. No state: a session that is moved, preempted or batched with others draws the same
numbers. Only integer operations on int64 tensors whose values stay below 2^63 (32 x 32 bit products are taken in 16-bit
halves), so every device computes the same bits.

    key     = seed (u64): low word, high word
    counter = (output index, choice, 0, 0)
    uniform = 53 bits of the first two words, in [0, 1)
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 x 32 bit product."""
    below = constant * (word & 0xFFFF)
    above = constant * (word >> 16) + (below >> 16)
    return above >> 16, ((above & 0xFFFF) << 16) | (below & 0xFFFF)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words per counter; words are int64 tensors in [0, 2^32) that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _WEYL[0]) & _WORD
        k1 = (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniforms(seeds: list[int], choices: list[int], first: list[int], count: int) -> Tensor:
    """`count` draws in [0, 1) for each (seed, choice), from output index `first` on; float64 [n, count] on the CPU."""
    low = torch.tensor([[seed & _WORD] for seed in seeds])
    high = torch.tensor([[(seed >> 32) & _WORD] for seed in seeds])
    index = (torch.tensor(first).unsqueeze(1) + torch.arange(count)) & _WORD
    choice = torch.tensor([[choice & _WORD] for choice in choices])
    zero = torch.zeros_like(choice)
    w0, w1, _, _ = philox((index, choice, zero, zero), (low, high))
    return ((w0 >> 5) * (1 << 26) + (w1 >> 6)).to(torch.float64) * 2.0**-53
