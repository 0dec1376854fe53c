"""The ways a step can be computed here, and which one a batch takes.

Owns the choice. All of them read the same pool and weights:

    small   few rows, on a CPU with a C++ compiler, of a file that is quantized: one compiled call (small_step.py)
    large   more rows of the same file, where the CPU multiplies bf16 by AMX: one compiled call too (large_step.py)
    many    more rows of the same file in float32, where the CPU has AVX2 and nothing better: as native, with the file's own weights (many_rows.py)
    native  the same machine, any other step: oneDNN's products, compiled parts between them (NativeDecoder)
    plain   torch alone, everywhere: what the others are tested against

Batch-invariant plans and embeddings do not come here: they have one path, the plain decoder's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from superfluid_core.clock import Clock
from superfluid_core.engine.torch.attention.base import AttentionBackend, AttentionShape
from superfluid_core.engine.torch.attention.cpu import CpuAttention
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.capabilities import compiled_gap
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.engine.torch.large_step import LargeStep, fits_large
from superfluid_core.engine.torch.many_rows import ManyRows, fits_many
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.engine.torch.native.build import NoNativeError, is_built, library
from superfluid_core.engine.torch.native.ops import fits, load_native
from superfluid_core.engine.torch.native_decoder import NativeDecoder
from superfluid_core.engine.torch.quantized import QuantizedWeights
from superfluid_core.engine.torch.small_step import ROWS_MAX, SmallStep

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Forward:
    """Computes steps. `about` names the paths, as part of what is said of this engine's numbers."""

    decoder: Decoder
    attention: AttentionBackend
    small: SmallStep | None = None
    large: LargeStep | None = None
    about: str = "torch ops"

    def __call__(self, batch: Batch) -> Tensor:
        """One step; float32 logits [sampled rows, vocabulary]. Mutates the KV slots that the batch names."""
        if self.small is not None and self.small.takes(batch):
            return self.small.forward(batch)
        if self.large is not None:
            return self.large.forward(batch)
        return self.decoder.forward(batch, self.attention)

    def bytes_read(self, rows: int) -> int | None:
        """Bytes of quantized weights that a step of so many rows reads; None when it reads the plain ones."""
        reads_plain = self.large is None and not isinstance(self.decoder, ManyRows)
        if self.small is None or (reads_plain and rows > ROWS_MAX):
            return None
        return self.small.weight_bytes


class Surrounding(NamedTuple):
    """Who tells the time, and who is told what happens."""

    clock: Clock
    say: Say


def build_ahead(cache: Path | None, clock: Clock, say: Say) -> None:
    """Begin to compile while weights are loaded; who needs the result waits for it, and hears of a failure then."""
    if cache is None or is_built(cache):
        return

    def build() -> None:
        with suppress(NoNativeError):
            library(cache, clock)

    say("compiling the ops of the CPU step, once")
    threading.Thread(target=build, name="superfluid-compile", daemon=True).start()


def make_compiled(
    cache: Path | None,
    decoder: Decoder,
    place: tuple[KvPool, AttentionShape],
    quantized: QuantizedWeights | None,
    around: Surrounding,
) -> Forward | None:
    """Put the compiled paths of a CPU model together; None, and a line that says why, where torch's ops must do."""
    if cache is None:
        return None
    gap = compiled_gap(decoder.config)
    if gap is not None:
        around.say(f"CPU step: torch ops, because the compiled ones do not know this model: {gap}")
        return None
    if not fits(decoder.config, decoder.weights.embedding.dtype):
        around.say(
            "CPU step: torch ops, because the model's sizes are not those of the compiled ones"
        )
        return None
    try:
        ops = load_native(cache, torch.get_num_threads(), around.clock)
    except NoNativeError as error:
        around.say(f"CPU step: torch ops, because there are no compiled ones: {error.message}")
        return None
    pool, shape = place
    attention = CpuAttention(pool, shape, ops, decoder.config.norm_eps)
    native = NativeDecoder(decoder, ops)
    if quantized is None:
        return Forward(native, attention, about="C++ ops")
    small = SmallStep(ops, decoder, quantized, pool)
    about = "C++ ops, quantized small steps"
    if fits_many(decoder, ops):
        many = ManyRows(decoder, ops, quantized)
        return Forward(many, attention, small, about=f"{about}, large ones by AVX2")
    if not fits_large(decoder.config, pool.shape, ops):
        return Forward(native, attention, small, about=about)
    large = LargeStep(ops, decoder.config, small)
    return Forward(native, attention, small, large, f"{about}, large ones by AMX")
