"""What the simulated engine uses in place of a machine: something to wait with, a vocabulary without a tokenizer, a draw under masks, vectors.

A simulation brings a `Pause` of its own that moves a virtual clock; a node sleeps for real, and can be woken.
"""

from __future__ import annotations

import math
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from superfluid_core.engine.scores import pack_scores
from superfluid_core.engine.script import TokenTexts
from superfluid_core.errors import ModelFilesError
from superfluid_core.grammar.lanes import Mask
from superfluid_core.session import TokenLogprobs

FEW = 64
VECTOR_SIZE = 64
CLOSERS = b'"}]'


class Pause(Protocol):
    """How a simulated step takes time: really, or by moving a virtual clock."""

    def wait(self, seconds: float) -> bool:
        """Let that much time pass; False as soon as `close` was called."""
        ...

    def close(self) -> None: ...


class ThreadPause:
    """Sleeps for real; `close` wakes the sleeper from any thread."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def wait(self, seconds: float) -> bool:
        return not self._closed.wait(seconds)

    def close(self) -> None:
        self._closed.set()


@dataclass(frozen=True, slots=True)
class NumberedTexts:
    """A vocabulary without a tokenizer: id i below 256 stands for byte i, the last id ends a text."""

    vocabulary: int = 4096

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (self.vocabulary - 1,)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.eos_ids)

    def ordinary_ids(self) -> Sequence[int]:
        return range(self.vocabulary - 1)

    def token_bytes(self, token: int, /) -> bytes:
        return bytes((token,)) if 0 <= token < 256 else b""

    def spell(self, data: bytes, /) -> list[int]:
        return list(data)


def closers_of(texts: TokenTexts) -> tuple[int, ...]:
    """List the ids that end something: the text, a string, an object, a list. Those of one byte, where there are such."""
    spelled: list[int] = []
    for byte in CLOSERS:
        try:
            spelled += texts.spell(bytes((byte,)))
        except ModelFilesError:
            continue
    return (*texts.eos_ids, *spelled)


def draw_masked(
    mask: Mask, place: int, closers: Sequence[int], may: Callable[[int], bool]
) -> int | None:
    """Choose an id under a mask by a hashed number; None where any of many ordinary ones will do.

    Every fourth draw closes what is open: hashes alone would write strings without an end.
    """
    if place % 4 == 0:
        for token in closers:
            if may(token):
                return token
    if int.from_bytes(mask.bits, "little").bit_count() > FEW:
        return None
    found = [token for token in mask.ids() if may(token)]
    return found[(place >> 2) % len(found)] if found else None


def hashed_scores(ids: Sequence[int], best: int, seed: int, vocabulary: int) -> bytes:
    """Invent log-probabilities of a text's tokens: ordered, finite, and the same on every run."""
    rows = []
    for at in range(1, len(ids)):
        told = f"{seed} {at} {ids[at - 1]} {ids[at]}".encode("ascii")
        place = int.from_bytes(blake2b(told, digest_size=4, person=b"superfluid-lpr").digest())
        logprob = -0.01 - place % 1_000_000 / 100_000
        others = ((ids[at] + step) % vocabulary for step in range(min(best, vocabulary)))
        top = tuple((token, logprob - 0.7 * step) for step, token in enumerate(others))
        rows.append(TokenLogprobs(logprob, top))
    return pack_scores(rows)


def hashed_vector(ids: Sequence[int], pooling: str, seed: int) -> bytes:
    """Make a text's vector of length 1 out of nothing but its ids, the pooling and the engine's seed."""
    data = array("Q", ids).tobytes() + seed.to_bytes(8, "little") + pooling.encode("ascii")
    text = blake2b(data, digest_size=32, person=b"superfluid-vec").digest()
    values: list[int] = []
    for part in range(VECTOR_SIZE // 16):
        digest = blake2b(part.to_bytes(4, "little"), digest_size=64, key=text).digest()
        values += struct.unpack("<16i", digest)
    length = math.sqrt(sum(value * value for value in values))
    return struct.pack(f"<{VECTOR_SIZE}f", *(value / length for value in values))
