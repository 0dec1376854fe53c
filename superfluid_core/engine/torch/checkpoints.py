"""From the files of a checkpoint to the source of its tensors.

Owns the choice alone: by the form of the files, and by whether their configuration says that they are quantized.
"""

from __future__ import annotations

from pathlib import Path

import torch

from superfluid_core.engine.torch.compressed.source import CompressedSource
from superfluid_core.engine.torch.sources import GgufSource, SafetensorsSource
from superfluid_core.modelfiles.config import ModelConfig

Source = SafetensorsSource | CompressedSource | GgufSource


def open_source(
    path: Path, kind: str, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Source:
    """Open a GGUF file (`kind` gguf) or a directory of safetensors. Raises ModelFilesError."""
    if kind == "gguf":
        return GgufSource(path, config, device, dtype)
    if config.quantization is not None:
        return CompressedSource(path, config, config.quantization, device, dtype)
    return SafetensorsSource(path, config, device, dtype)
