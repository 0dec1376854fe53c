"""Seeded pseudo-random prose: prompts of any length that compress badly, share nothing and are the same everywhere.

Pure: a small linear congruential generator stands in for `random`, so a seed means the same text on every Python.
"""

from __future__ import annotations

_VOCABULARY = """
river lantern garden winter signal copper meadow harbour engine quiet thunder paper island
bridge market orchard silver window carriage mountain valley candle morning station letter
forest kitchen shadow weather journey history the a some every another under over beside through
without carries finds opens follows remembers measures paints repairs counts answers slowly
often never perhaps tomorrow early bright narrow ancient hollow gentle distant
"""
_WORDS = _VOCABULARY.split()
_MULTIPLIER, _INCREMENT, _MODULUS = 6364136223846793005, 1442695040888963407, 1 << 64


class Draws:
    """A stream of 31-bit numbers."""

    def __init__(self, seed: int) -> None:
        self._state = (seed * 2654435761 + 97) % _MODULUS
        self.below(2)

    def below(self, limit: int) -> int:
        self._state = (self._state * _MULTIPLIER + _INCREMENT) % _MODULUS
        return (self._state >> 33) % limit


def prose(seed: int, words: int) -> str:
    """`words` words in sentences of 6 to 15."""
    source, sentences, left = Draws(seed), [], words
    while left > 0:
        length = min(left, 6 + source.below(10))
        text = " ".join(_WORDS[source.below(len(_WORDS))] for _ in range(length))
        sentences.append(text.capitalize() + ".")
        left -= length
    return " ".join(sentences)
