"""A 48-bit linear congruential generator: the same draws on every machine and in every version."""

from __future__ import annotations

import math

_log = math.log
_MULTIPLIER = 0x5DEECE66D
_INCREMENT = 0xB
_MASK = (1 << 48) - 1
_WHOLE = 1 << 53


class Draws:
    """Numbers from a seed that is scrambled by the multiplier; doubles of 53 bits."""

    def __init__(self, seed: int) -> None:
        self._state = (seed ^ _MULTIPLIER) & _MASK

    def bits(self, count: int) -> int:
        """Take the highest `count` bits (at most 32) of the next state."""
        self._state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        return self._state >> (48 - count)

    def double(self) -> float:
        """Draw from [0, 1)."""
        first = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        self._state = (first * _MULTIPLIER + _INCREMENT) & _MASK
        return ((first >> 22 << 27) + (self._state >> 21)) / _WHOLE

    def below(self, limit: int) -> int:
        """Draw a whole number from 0..limit-1."""
        return int(self.double() * limit)

    def exponential(self, mean: float) -> float:
        return -mean * _log(1.0 - self.double())
