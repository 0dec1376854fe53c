"""A model's weights without their numbers: what `inspect` knows before anything is loaded.

Owns two answers. `outline` assembles a decoder of shapes alone, by the same code that loads it, so a tensor that is missing, misshapen
or of a type that is not read is found in a second and by its name. `way` says how steps would be computed on this machine, by the same
checks that choose it at start. It must not read a weight.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from superfluid_core.engine.torch.capabilities import compiled_gap, layer_gap, recorded_gap
from superfluid_core.engine.torch.checkpoints import Source, open_source
from superfluid_core.engine.torch.dequant import DECODERS
from superfluid_core.engine.torch.native.build import COMPILERS
from superfluid_core.engine.torch.native.ops import fits
from superfluid_core.engine.torch.quantized import GROUP, PLAIN
from superfluid_core.engine.torch.sources import Entry, GgufSource
from superfluid_core.engine.torch.weights import Checkpoint, assemble
from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import ModelConfig

META = torch.device("meta")
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
WINDOW = 2  # tables of so many positions: their numbers are not looked at


@dataclass(slots=True)
class Outline:
    """Tensors that the engine takes, by the name that it asks for; `problem` is why it could not load them all."""

    taken: dict[str, Entry] = field(default_factory=dict)
    problem: str | None = None

    @property
    def stored(self) -> frozenset[str]:
        """Names in the file, of which one may hold several tensors."""
        taken = self.taken.values()
        return frozenset(name for entry in taken for name in (entry.stored, *entry.beside))


class _Shapes:
    """Implements WeightSource with tensors that have no numbers."""

    def __init__(self, source: Source, outline: Outline) -> None:
        self._source = source
        self._outline = outline
        is_gguf = isinstance(source, GgufSource)
        self._readable = {kind.name for kind in DECODERS} if is_gguf else set(PLAIN_TYPES)

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def get(self, name: str) -> Tensor:
        entry = self._source.entry(name)
        if entry is None:
            raise ModelFilesError(f"there is no tensor {name!r}, nor one that it could be cut from")
        if entry.type not in self._readable and not entry.beside:
            known = ", ".join(sorted(self._readable))
            raise ModelFilesError(
                f"tensor {entry.stored!r} is of type {entry.type}; read are {known}"
            )
        self._outline.taken[name] = entry
        if name.startswith("rope_"):
            return torch.ones(entry.shape)
        return torch.empty(entry.shape, device=META)


def outline(files: Checkpoint) -> Outline:
    """Go through all tensors as loading would. Raises ModelFilesError only where the files cannot be opened."""
    found = Outline()
    path, config = Path(files.path), files.config
    with open_source(path, files.kind, config, META, torch.float32) as source:
        try:
            assemble(_Shapes(source, found), config, WINDOW)
        except ModelFilesError as error:
            found.problem = error.message
    return found


def quantized_gap(config: ModelConfig, taken: dict[str, Entry]) -> str | None:
    """Say why few rows are not computed over a file's own quantized weights; None when they are."""
    top = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    plain = {kind.name for kind in PLAIN}
    for name, entry in taken.items():
        if len(entry.shape) != 2 or (not name.startswith("model.layers.") and name != top):
            continue
        if entry.type in plain:
            return f"{entry.stored} is not quantized"
        if entry.shape[1] % GROUP:
            return f"{entry.stored} has rows of {entry.shape[1]}"
        other = taken.get(name.replace(".gate_proj.", ".up_proj."), entry)
        if (entry.type in FOUR_BITS) != (other.type in FOUR_BITS):
            return f"{entry.stored} and {other.stored} are of different widths"
    return None


class Way(NamedTuple):
    """How steps would be computed, and why not otherwise."""

    path: str
    reasons: tuple[str, ...]


def way(
    files: Checkpoint, found: Outline, device: torch.device, dtype: torch.dtype, *, is_exact: bool
) -> Way:
    """Say how this machine would compute the model's steps. `is_exact`: float32 was asked for."""
    config = files.config
    if device.type != "cpu":
        return _cuda_way(config, found.taken)
    gap = compiled_gap(config)
    if gap is not None:
        return Way("torch operators", (f"the compiled CPU steps do not know this model: {gap}",))
    if not fits(config, dtype):
        return Way("torch operators", ("the model's sizes are not those of the compiled steps",))
    if not any(shutil.which(name) for name in COMPILERS):
        return Way("torch operators", (f"no C++ compiler ({', '.join(COMPILERS)})",))
    if files.kind != "gguf":
        return Way("compiled CPU steps", ())
    small = "float32 was asked for" if is_exact else quantized_gap(config, found.taken)
    if small is not None:
        return Way("compiled CPU steps", (f"no small steps over quantized weights: {small}",))
    return Way("small steps over the file's quantized weights, others compiled", ())


def _cuda_way(config: ModelConfig, taken: dict[str, Entry]) -> Way:
    """Attention and kernels are proven at start; what can be told before is how layers, weights and decode steps go."""
    recorded, layers = recorded_gap(config), layer_gap(config)
    has_triton = importlib.util.find_spec("triton") is not None
    if layers is None and not has_triton:
        layers = "triton is not installed"
    reasons = [] if recorded is None else [f"decode steps are not recorded: {recorded}"]
    reasons += [] if layers is None else [f"layers are not fused: {layers}"]
    parts = ["recorded decode steps" if recorded is None else "eager decode steps"]
    parts.append("fused layers" if layers is None else "torch layers")
    if has_triton and any(entry.type not in PLAIN_TYPES for entry in taken.values()):
        parts.append("quantized weights as they are")
    return Way(
        f"{', '.join(parts)}; attention by the first kernel that proves itself", tuple(reasons)
    )
