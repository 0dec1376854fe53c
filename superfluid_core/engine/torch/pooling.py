"""Vectors of texts: hidden states behind the last norm, pooled and scaled to length 1; and scores: how likely each token was.

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
from superfluid_core.engine.scores import best_of
from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.attention.registry import make_attention
from superfluid_core.engine.torch.batch import BlockTables, compose_batch
from superfluid_core.engine.torch.kvcache import KvPool, KvShape
from superfluid_core.engine.torch.layers import rms_norm
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.errors import CapacityError, ErrorCode, GenerationError
from superfluid_core.scheduler.plan import LanePlan

PASS_TOKENS = {"cpu": 128, "cuda": 1024}
SCORED_AT_ONCE = 64
"""Rows whose logits exist at once: a vocabulary wide each."""


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
        best = best_of(pooling)
        if best is not None:
            yield from self._score(ids, best)
            return
        total: Tensor | None = None
        for states in self._states(ids):
            if states is None:
                yield None
                continue
            hidden = self._normed(states)
            summed = hidden.sum(0) if pooling == "mean" else hidden[-1]
            total = summed if total is None or pooling == "last" else total + summed
        assert total is not None
        vector = torch.nn.functional.normalize(total, dim=0).cpu()
        if not bool(torch.isfinite(vector).all()):
            raise _not_finite("hidden states")
        yield vector.numpy().astype("<f4").tobytes()

    def _score(self, ids: Sequence[int], best: int) -> Iterator[bytes | None]:
        """Compute the log-probability of every token but the first, and the best in its place, some rows at once."""
        chosen: list[Tensor] = []
        places: list[Tensor] = []
        values: list[Tensor] = []
        following = torch.tensor(ids[1:], dtype=torch.int64, device=self.device)
        at = 0
        for states in self._states(ids):
            if states is None:
                yield None
                continue
            for rows in torch.split(states, SCORED_AT_ONCE):
                wanted = following[at : at + len(rows)].unsqueeze(1)
                logprobs = self.decoder.project(rows[: len(wanted)]).float().log_softmax(-1)
                top = logprobs.topk(min(best, logprobs.shape[1]))
                chosen.append(logprobs.gather(1, wanted).squeeze(1).cpu())
                places.append(top.indices.cpu())
                values.append(top.values.cpu())
                at += len(rows)
        logprob = torch.cat(chosen)
        if bool(torch.isnan(logprob).any()):
            raise _not_finite("logits")
        columns = (
            logprob.numpy().astype("<f4"),
            torch.cat(places).numpy().astype("<u4"),
            torch.cat(values).numpy().astype("<f4"),
        )
        yield b"".join(column.tobytes() for column in columns)

    def _states(self, ids: Sequence[int]) -> Iterator[Tensor | None]:
        """Run a text through the layers: what leaves them of each pass, and None between two passes."""
        block_tokens = self.shape.block_tokens
        blocks = -(-len(ids) // block_tokens)
        pool = self._pool(blocks)
        attention = make_attention(self.backend, pool, self.attention)
        plan = LanePlan(0, False, 0, (), 0, 0, tuple(range(blocks)))
        tables = BlockTables((plan,), block_tokens)
        for first in range(0, len(ids), self.pass_tokens):
            inputs = tuple(ids[first : first + self.pass_tokens])
            row = StepRow(0, first, inputs, False, 0, False)
            batch = compose_batch([row], tables, self.device)
            pool.clear(batch.fresh)
            yield self.decoder.run_layers(batch, attention)
            if first + self.pass_tokens < len(ids):
                pool.synchronize()
                yield None

    def _normed(self, hidden: Tensor) -> Tensor:
        config = self.decoder.config
        return rms_norm(hidden, self.decoder.weights.final_norm, config.norm_eps).float()

    def _pool(self, blocks: int) -> KvPool:
        try:
            return KvPool(replace(self.shape, blocks=blocks), self.device)
        except (torch.OutOfMemoryError, MemoryError) as error:
            text = "no memory to embed a text of this length now"
            raise CapacityError(text, code=ErrorCode.OVERLOADED, retry_after_ms=1_000) from error


def _not_finite(what: str) -> GenerationError:
    return GenerationError(f"the model's {what} are not finite", code=ErrorCode.NAN_LOGITS)
