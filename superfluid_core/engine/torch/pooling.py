"""Vectors of texts: hidden states behind the last norm, pooled and scaled to length 1.

A text has keys and values of its own, in a small pool that lives as long as it does: what it computes depends on no batch mate and on no
cache, and the scheduler's blocks are not touched. Passes have one size and are the same however busy the engine is, so equal
texts give equal bits. They are small, for between two ticks there is time for at least one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.attention.registry import make_attention
from superfluid_core.engine.torch.batch import BlockTables, compose_batch
from superfluid_core.engine.torch.kvcache import KvPool, KvShape
from superfluid_core.engine.torch.layers import rms_norm
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.errors import CapacityError, ErrorCode, GenerationError
from superfluid_core.scheduler.plan import LanePlan

PASS_TOKENS = {"cpu": 128, "cuda": 1024}


@dataclass(frozen=True, slots=True)
class Pooler:
    """What texts are embedded with. `shape` is the scheduler's pool's, of which only the kind of blocks is used."""

    decoder: Decoder
    shape: KvShape
    device: torch.device
    backend: str
    attention: AttentionShape
    pass_tokens: int

    @torch.inference_mode()
    def embed(self, ids: Sequence[int], pooling: str) -> Iterator[bytes | None]:
        """See `Embedder.embed`. Raises CapacityError when its pool does not fit, GenerationError for numbers that are not finite."""
        block_tokens = self.shape.block_tokens
        blocks = -(-len(ids) // block_tokens)
        pool = self._pool(blocks)
        attention = make_attention(self.backend, pool, self.attention)
        plan = LanePlan(0, False, 0, (), 0, 0, tuple(range(blocks)))
        tables = BlockTables((plan,), block_tokens)
        total: Tensor | None = None
        for first in range(0, len(ids), self.pass_tokens):
            inputs = tuple(ids[first : first + self.pass_tokens])
            row = StepRow(0, first, inputs, False, 0, False)
            batch = compose_batch([row], tables, self.device)
            pool.clear(batch.fresh)
            hidden = self._normed(self.decoder.run_layers(batch, attention))
            summed = hidden.sum(0) if pooling == "mean" else hidden[-1]
            total = summed if total is None or pooling == "last" else total + summed
            if first + self.pass_tokens < len(ids):
                pool.synchronize()
                yield None
        assert total is not None
        vector = torch.nn.functional.normalize(total, dim=0).cpu()
        if not bool(torch.isfinite(vector).all()):
            text = "the model's hidden states are not finite"
            raise GenerationError(text, code=ErrorCode.NAN_LOGITS)
        yield vector.numpy().astype("<f4").tobytes()

    def _normed(self, hidden: Tensor) -> Tensor:
        config = self.decoder.config
        return rms_norm(hidden, self.decoder.weights.final_norm, config.norm_eps).float()

    def _pool(self, blocks: int) -> KvPool:
        try:
            return KvPool(replace(self.shape, blocks=blocks), self.device)
        except (RuntimeError, MemoryError) as error:
            text = "no memory to embed a text of this length now"
            raise CapacityError(text, code=ErrorCode.OVERLOADED, retry_after_ms=1_000) from error
