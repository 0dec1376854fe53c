"""Packed numbers: little-endian u32 and doubles, whatever the machine, and the head fields made of them.

Token ids never travel as msgpack arrays: a mebibyte of those costs 70 MB to decode. Floats are doubles, so that what a
moved session carries is exact. Every function raises BreachError for what does not fit.
"""

from __future__ import annotations

import math
import sys
from array import array
from dataclasses import dataclass
from typing import Any

from superfluid_core.wire.kinds import BreachError


def pack_u32(ids: Any) -> bytes:
    """Token ids as packed little-endian u32. Raises BreachError."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError):
        raise BreachError("holds what is no u32") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(data: bytes | memoryview) -> tuple[int, ...]:
    if len(data) == 4:
        return (int.from_bytes(data, "little"),)
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def pack_f64(values: Any) -> bytes:
    """Finite floats as packed little-endian doubles (exact, so a moved stream stays equal). Raises BreachError."""
    try:
        packed = array("d", values)
    except TypeError:
        raise BreachError("holds what is no float") from None
    if not all(map(math.isfinite, packed)):
        raise BreachError("holds a float that is not finite")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_f64(data: bytes | memoryview) -> tuple[float, ...]:
    """Reverse pack_f64. Raises BreachError."""
    return tuple(judge_f64(data))


def judge_f64(data: bytes | memoryview) -> array[float]:
    """Do the same, without an object for each. Raises BreachError."""
    packed = array("d")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    if not all(map(math.isfinite, packed)):
        raise BreachError("holds a float that is not finite")
    return packed


assert array("I").itemsize == 4
assert array("d").itemsize == 8


@dataclass(frozen=True, slots=True)
class PackedIds:
    """A short list of token ids, packed into bytes of the head."""

    count_max: int

    def read(self, value: Any) -> tuple[int, ...]:
        if type(value) is not bytes or len(value) % 4:
            raise BreachError("is not packed ids")
        if len(value) > 4 * self.count_max:
            raise BreachError(f"has more than {self.count_max} entries")
        return unpack_u32(value)

    def write(self, value: Any) -> bytes:
        if len(value) > self.count_max:
            raise BreachError(f"has more than {self.count_max} entries")
        return pack_u32(value)


@dataclass(frozen=True, slots=True)
class PackedBias:
    """Pairs (token id, float): all the ids, then all the floats."""

    count_max: int

    def read(self, value: Any) -> tuple[tuple[int, float], ...]:
        if type(value) is not bytes or len(value) % 12:
            raise BreachError("is not packed pairs")
        count = len(value) // 12
        if count > self.count_max:
            raise BreachError(f"has more than {self.count_max} entries")
        ids, floats = unpack_u32(value[: 4 * count]), unpack_f64(value[4 * count :])
        return tuple(zip(ids, floats, strict=True))

    def write(self, value: Any) -> bytes:
        if len(value) > self.count_max:
            raise BreachError(f"has more than {self.count_max} entries")
        return pack_u32([pair[0] for pair in value]) + pack_f64([pair[1] for pair in value])


@dataclass(frozen=True, slots=True)
class PackedRates:
    """Pairs (lanes, rate) as in PackedBias; no rate is below 0."""

    count_max: int

    def read(self, value: Any) -> tuple[tuple[int, float], ...]:
        pairs = PackedBias(self.count_max).read(value)
        if any(rate < 0.0 for _, rate in pairs):
            raise BreachError("holds a rate below 0")
        return pairs

    def write(self, value: Any) -> bytes:
        if any(rate < 0.0 for _, rate in value):
            raise BreachError("holds a rate below 0")
        return PackedBias(self.count_max).write(value)


@dataclass(frozen=True, slots=True)
class PackedWords:
    """Lists of token ids: [how many ids each, packed; all the ids, packed]; no list is empty."""

    count_max: int
    ids_max: int

    def read(self, value: Any) -> tuple[tuple[int, ...], ...]:
        if type(value) is not list or len(value) != 2:
            raise BreachError("is not packed lists")
        lengths = PackedIds(self.count_max).read(value[0])
        ids = PackedIds(self.ids_max).read(value[1])
        if sum(lengths) != len(ids) or 0 in lengths:
            raise BreachError("is not packed lists")
        words, start = [], 0
        for length in lengths:
            words.append(ids[start : start + length])
            start += length
        return tuple(words)

    def write(self, value: Any) -> list[bytes]:
        if not all(value):
            raise BreachError("holds an empty list")
        lengths = PackedIds(self.count_max).write([len(word) for word in value])
        return [lengths, PackedIds(self.ids_max).write([token for word in value for token in word])]
