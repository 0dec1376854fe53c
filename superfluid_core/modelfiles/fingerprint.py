"""Names for what a model is: one for its texts, one for its weights.

Owns the two digests that heads and nodes compare (decisions.md 5). It must not know the link. The
idea: a session moves between nodes only when their weights are the same, yet hashing gigabytes at
start is out of the question; the directory of tensors plus evenly spread samples of the data tell
any two builds apart that differ by more than a few bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import ModelConfig

HEX_DIGITS = 16
SAMPLES = 64
SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, end) of a file that hold tensor data."""

    path: Path
    start: int
    end: int


def text_fingerprint(parts: Mapping[str, bytes]) -> str:
    """Digest what decides how text becomes ids: named parts, in the order of their names."""
    digest = hashlib.sha256(b"superfluid text 1\0")
    for name in sorted(parts):
        _add(digest.update, name.encode())
        _add(digest.update, parts[name])
    return digest.hexdigest()[:HEX_DIGITS]


def weights_fingerprint(
    config: ModelConfig, directory: Iterable[Sequence[object]], extents: Sequence[Extent]
) -> str:
    """Digest the shape, the tensors' directory and sampled data.

    `directory` rows (name, type, shape) are sorted here; `extents` are in the order of the files.
    """
    shape = _told(config)
    digest = hashlib.sha256(b"superfluid weights 1\0")
    _add(digest.update, json.dumps(shape, sort_keys=True).encode())
    rows = sorted(json.dumps([str(field) for field in row]) for row in directory)
    _add(digest.update, "\n".join(rows).encode())
    for sample in _samples(extents):
        _add(digest.update, sample)
    return digest.hexdigest()[:HEX_DIGITS]


def _told(config: ModelConfig) -> dict[str, object]:
    """Collect what a configuration says.

    A value that came into `ModelConfig` later counts only where it says something, so old digests stay.
    """
    shape = asdict(replace(config, bos_id=None, eos_ids=()))
    told = {
        field.name: shape[field.name]
        for field in fields(config)
        if field.default is MISSING or getattr(config, field.name) != field.default
    }
    for name in ("short_factors", "long_factors"):
        if not shape["rope_scaling"][name]:
            del told["rope_scaling"][name]
    for name in ("mode", "own"):
        if shape["quantization"] is not None and not shape["quantization"][name]:
            del told["quantization"][name]
    return told


def _add(update: Callable[[bytes], None], data: bytes) -> None:
    """Add length and data, so that no two sequences of parts look alike."""
    update(len(data).to_bytes(8, "little"))
    update(data)


def _samples(extents: Sequence[Extent]) -> Iterable[bytes]:
    """Cut evenly spread pieces out of all extents laid end to end, the last bytes included."""
    total = sum(extent.end - extent.start for extent in extents)
    yield total.to_bytes(8, "little")
    if total <= SAMPLES * SAMPLE_BYTES:
        wanted = list(range(0, total, SAMPLE_BYTES))
    else:
        room = total - SAMPLE_BYTES
        wanted = [index * room // (SAMPLES - 1) for index in range(SAMPLES)]
    passed = 0
    for extent in extents:
        size = extent.end - extent.start
        inside = [at - passed for at in wanted if passed <= at < passed + size]
        passed += size
        if inside:
            yield from _pieces(extent, inside)


def _pieces(extent: Extent, places: list[int]) -> Iterable[bytes]:
    try:
        with extent.path.open("rb", buffering=0) as file:
            for place in places:
                start = extent.start + place
                file.seek(start)
                yield file.read(min(SAMPLE_BYTES, extent.end - start))
    except OSError as cause:
        raise ModelFilesError(f"cannot read {extent.path}: {cause.strerror}") from cause
