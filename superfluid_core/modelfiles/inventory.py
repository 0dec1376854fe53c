"""What a model's files hold, tensor by tensor, from their directories alone.

Owns the one list for both forms of file. It must not know which tensors an engine takes nor what types it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from superfluid_core.modelfiles.gguf import GgufFile
from superfluid_core.modelfiles.safetensors import SafetensorsIndex


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor in a file."""

    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int


def inventory(path: Path, kind: str) -> tuple[Held, ...]:
    """List all tensors of a GGUF file (`kind` gguf) or of a directory of safetensors. Raises ModelFilesError."""
    if kind == "gguf":
        file = GgufFile.open(path)
        try:
            return tuple(
                Held(tensor.name, tensor.type.name, tensor.shape, tensor.bytes)
                for tensor in file.tensors.values()
            )
        finally:
            file.close()
    return tuple(
        Held(name, found.dtype, found.shape, found.end - found.start)
        for name, found in SafetensorsIndex.open(path).tensors.items()
    )
