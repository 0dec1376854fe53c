"""Where each tensor of a safetensors model lies: one file or many behind an index.

Owns the reading of headers, with every offset compared with the size of its file. It must not load
tensors: the engine does, through the `safetensors` library. The idea: names, types and places are
known before a gigabyte is touched, and a shard named in an index can only be a file beside it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.values import Fields, parse_table, read_small

HEADER_BYTES_MAX = 64 << 20
SHARDS_MAX = 4096
DIMENSIONS_MAX = 8
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ELEMENT_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "F4": 4,
}


class Located(NamedTuple):
    """A tensor's place: bytes [start, end) of the file at `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsIndex:
    """All tensors of a model directory by name."""

    directory: Path
    files: tuple[Path, ...]
    tensors: dict[str, Located]

    @classmethod
    def open(cls, directory: str | Path) -> SafetensorsIndex:
        """Read the index or the single file, and the header of every file."""
        directory = Path(directory)
        wanted = _weight_map(directory)
        files = _files(directory, wanted)
        tensors: dict[str, Located] = {}
        for file in files:
            for name, located in _header(file).items():
                if name in tensors:
                    raise ModelFilesError(f"tensor {name[:80]!r} comes twice")
                tensors[name] = located
        for name, shard in wanted.items():
            if name not in tensors or tensors[name].path.name != shard:
                raise ModelFilesError(f"tensor {name[:80]!r} is not in {shard[:80]!r} as indexed")
        return cls(directory, files, tensors)

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def locate(self, name: str) -> Located:
        found = self.tensors.get(name)
        if found is None:
            raise ModelFilesError(f"the model has no tensor {name[:80]!r}")
        return found


def _weight_map(directory: Path) -> dict[str, str]:
    """Read tensor name -> file name of the index; empty when there is no index."""
    path = directory / INDEX
    if not path.is_file():
        return {}
    table = Fields(parse_table(read_small(path), INDEX), INDEX).mapping("weight_map")
    wanted: dict[str, str] = {}
    for name, shard in table.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard:
            raise ModelFilesError(f"{INDEX}: a shard has to be a file beside it")
        if not shard.endswith(".safetensors"):
            raise ModelFilesError(f"{INDEX}: {shard[:80]!r} is not a safetensors file")
        wanted[name] = shard
    if not wanted:
        raise ModelFilesError(f"{INDEX}: weight_map is empty")
    return wanted


def _files(directory: Path, wanted: dict[str, str]) -> tuple[Path, ...]:
    if wanted:
        files = tuple(directory / shard for shard in sorted(set(wanted.values())))
    elif (directory / SINGLE).is_file():
        files = (directory / SINGLE,)
    else:
        files = tuple(sorted(directory.glob("*.safetensors")))
    if not files:
        raise ModelFilesError(f"{directory} holds no safetensors (other formats are never read)")
    if len(files) > SHARDS_MAX:
        raise ModelFilesError(f"{len(files)} shards are more than the bound of {SHARDS_MAX}")
    for file in files:
        if not file.is_file():
            raise ModelFilesError(f"{file.name} is missing from {directory}")
    return files


def _header(path: Path) -> dict[str, Located]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, HEADER_BYTES_MAX):
                raise ModelFilesError(f"{path.name}: the header is longer than the file or bound")
            text = file.read(length)
    except OSError as cause:
        raise ModelFilesError(f"cannot read {path}: {cause.strerror}") from cause
    base = 8 + length
    table = parse_table(text, path.name)
    table.pop("__metadata__", None)
    return {name: _located(path, name, entry, (base, size)) for name, entry in table.items()}


def _located(path: Path, name: str, entry: object, bounds: tuple[int, int]) -> Located:
    """Check one entry of a header: its place within `bounds`, its size against its shape."""
    where = f"{path.name}: {name[:80]}"
    if not isinstance(entry, dict):
        raise ModelFilesError(f"{where} is not an object")
    fields = Fields(entry, where)
    dtype = fields.text("dtype")
    shape = _sizes(fields, "shape")
    places = _sizes(fields, "data_offsets")
    if dtype not in ELEMENT_BITS:
        raise ModelFilesError(f"{where} has the unknown type {dtype[:20]!r}")
    if len(places) != 2 or len(shape) > DIMENSIONS_MAX:
        raise ModelFilesError(f"{where} has a strange shape or place")
    bits = ELEMENT_BITS[dtype]
    for dimension in shape:
        bits *= dimension
    base, end_of_file = bounds
    start, end = base + places[0], base + places[1]
    if not base <= start <= end <= end_of_file:
        raise ModelFilesError(f"{where} ends past the file: it was cut short")
    if (end - start) * 8 != bits:
        raise ModelFilesError(f"{where}: shape {json.dumps(shape)} does not fill its bytes")
    return Located(path, dtype, shape, start, end)


def _sizes(fields: Fields, key: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for size in fields.numbers(key):
        if not isinstance(size, int) or not 0 <= size < 1 << 60:
            raise ModelFilesError(f"safetensors header: {key} should hold whole numbers")
        sizes.append(size)
    return tuple(sizes)
