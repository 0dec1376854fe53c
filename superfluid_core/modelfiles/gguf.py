"""A GGUF file, read with struct over a memory map.

Owns the container: header, metadata, tensor directory. It must not know what the keys mean nor how
quantized blocks are decoded. The idea: the file is a stranger, so every count, length and offset is
compared with the bytes that are left *before* anything of that size is made; a hostile file ends in
`ModelFilesError`, never in MemoryError. Strings are cut in one tight loop, as vocabularies hold
hundreds of thousands of them.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from superfluid_core.errors import ModelFilesError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
KEYS_MAX = 1 << 16
TENSORS_MAX = 1 << 17
TEXT_BYTES_MAX = 16 << 20
ITEMS_MAX = 8 << 20  # array entries of all keys together
NESTING_MAX = 3
DIMENSIONS_MAX = 4
NAME_BYTES_MAX = 1024
ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 1 << 20


class GgmlType(IntEnum):
    """Element types by their number in the file; those of the engine and those only named."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


# type -> (elements of a block, bytes of a block)
BLOCKS: dict[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q8_1: (32, 40),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.Q8_K: (256, 292),
    GgmlType.IQ2_XXS: (256, 66),
    GgmlType.IQ2_XS: (256, 74),
    GgmlType.IQ3_XXS: (256, 98),
    GgmlType.IQ1_S: (256, 50),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.IQ3_S: (256, 110),
    GgmlType.IQ2_S: (256, 82),
    GgmlType.IQ4_XS: (256, 136),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.F64: (1, 8),
    GgmlType.IQ1_M: (256, 56),
    GgmlType.BF16: (1, 2),
    GgmlType.TQ1_0: (256, 54),
    GgmlType.TQ2_0: (256, 66),
    GgmlType.MXFP4: (32, 17),
}

# metadata value types: number -> struct code; 8 is text, 9 an array
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
TEXT = 8
ARRAY = 9
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: `shape` outermost first, `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    bytes: int


class GgufFile:
    """An open, memory-mapped GGUF file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self._map = data
        self._view = memoryview(data)
        reader = _Reader(data)
        keys, tensors = reader.header()
        self.metadata: dict[str, Any] = reader.metadata(keys)
        self.tensors: dict[str, GgufTensor] = reader.tensors(tensors, self._alignment())

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Map and read the file's directory; raises ModelFilesError when it cannot be trusted."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as cause:
            raise ModelFilesError(f"cannot read {path}: {cause.strerror}") from cause
        except ValueError as cause:
            raise ModelFilesError(f"{path} is empty") from cause
        try:
            return cls(path, data)
        except ModelFilesError as cause:
            raise ModelFilesError(f"{path.name}: {cause.message}") from cause

    def data(self, tensor: GgufTensor) -> memoryview:
        """Give the raw bytes of a tensor, without a copy; valid until `close`."""
        return self._view[tensor.offset : tensor.offset + tensor.bytes]

    def close(self) -> None:
        """Give the map back; while views of `data` live it stays until the last of them dies."""
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            return

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        if not isinstance(value, int) or not 8 <= value <= ALIGNMENT_MAX or value & (value - 1):
            raise ModelFilesError("alignment is not a power of two within bounds")
        return value


class _Reader:
    """A cursor over the map; each method checks what it is about to read against what is left."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0
        self._items_left = ITEMS_MAX

    def header(self) -> tuple[int, int]:
        """Magic and version; returns how many keys and tensors the file says to hold."""
        if self._data[:4] != MAGIC:
            raise ModelFilesError("this is not a GGUF file")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            if version & 0xFFFF == 0:
                raise ModelFilesError("big-endian GGUF is not supported")
            raise ModelFilesError(f"GGUF version {version} is not supported, only {known}")
        tensors = self._count(TENSORS_MAX, "tensors", 24)
        keys = self._count(KEYS_MAX, "metadata keys", 13)
        return keys, tensors

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self._text(NAME_BYTES_MAX)
            if key in found:
                raise ModelFilesError(f"metadata key {key[:80]!r} comes twice")
            found[key] = self._value(self._number("I"), 0)
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """Read the tensor directory; offsets in it count from the aligned end of the directory."""
        entries = [self._tensor_entry() for _ in range(count)]
        base = (self._at + alignment - 1) // alignment * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            size = _tensor_bytes(name, shape, kind)
            if offset % alignment:
                raise ModelFilesError(f"tensor {name[:80]!r} is not aligned")
            if base + offset + size > self._size:
                raise ModelFilesError(f"tensor {name[:80]!r} ends past the file: it was cut short")
            if name in found:
                raise ModelFilesError(f"tensor {name[:80]!r} comes twice")
            found[name] = GgufTensor(name, shape, kind, base + offset, size)
        return found

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], GgmlType, int]:
        name = self._text(NAME_BYTES_MAX)
        dimensions = self._number("I")
        if dimensions > DIMENSIONS_MAX:
            raise ModelFilesError(f"tensor {name[:80]!r} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number = self._number("I")
        try:
            kind = GgmlType(number)
        except ValueError as cause:
            raise ModelFilesError(
                f"tensor {name[:80]!r} has the unknown element type {number}"
            ) from cause
        return name, shape, kind, self._number("Q")

    def _value(self, kind: int, depth: int) -> Any:
        if kind == TEXT:
            return self._text(TEXT_BYTES_MAX)
        if kind == ARRAY:
            return self._array(depth)
        if kind not in SCALARS:
            raise ModelFilesError(f"metadata value of unknown type {kind}")
        return self._number(SCALARS[kind])

    def _array(self, depth: int) -> list[Any]:
        if depth >= NESTING_MAX:
            raise ModelFilesError("metadata arrays are nested too deeply")
        kind = self._number("I")
        if kind in SCALARS:
            code = SCALARS[kind]
            count = self._count(self._items_left, "array entries", struct.calcsize("<" + code))
            self._items_left -= count
            values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
            self._at += struct.calcsize(f"<{count}{code}")
            return list(values)
        count = self._count(self._items_left, "array entries", 8)
        self._items_left -= count
        if kind == TEXT:
            return self._texts(count)
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _texts(self, count: int) -> list[str]:
        """`count` texts in a row: the hot loop of opening a file."""
        data, at, last = self._data, self._at, self._size - 8
        length_at = _COUNT.unpack_from
        found: list[str] = []
        for _ in range(count):
            if at > last:
                raise ModelFilesError("the file ends within its metadata")
            (length,) = length_at(data, at)
            start = at + 8
            at = start + length
            if length > TEXT_BYTES_MAX or at > last + 8:
                raise ModelFilesError("a text is longer than the file or its bound")
            found.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return found

    def _text(self, bytes_max: int) -> str:
        length = self._count(bytes_max, "bytes of text", 1)
        start = self._at
        self._at = start + length
        return self._data[start : self._at].decode("utf-8", "replace")

    def _count(self, at_most: int, what: str, bytes_each: int) -> int:
        """Read a count that the rest of the file can hold and that its bound allows."""
        count: int = self._number("Q")
        if count > at_most:
            raise ModelFilesError(f"{count} {what} are more than the bound of {at_most}")
        if count * bytes_each > self._size - self._at:
            raise ModelFilesError(f"{count} {what} are more than the file can hold")
        return count

    def _number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        if self._at + size > self._size:
            raise ModelFilesError("the file ends within its directory")
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += size
        return value


def _tensor_bytes(name: str, shape: tuple[int, ...], kind: GgmlType) -> int:
    elements = 1
    for size in shape:
        elements *= size
    per_block, block_bytes = BLOCKS[kind]
    if shape and shape[-1] % per_block:
        raise ModelFilesError(
            f"tensor {name[:80]!r}: rows of {shape[-1]} do not fill {kind.name} blocks"
        )
    return elements // per_block * block_bytes
