"""Attention by FlashInfer's paged kernels, where that library is installed.

Owns the translation of a step into its page tables: `indptr` counts pages by row, `indices` lists them, the last page's length closes
a row. The library plans on the host, once a step, and keeps a workspace; decode and prefill have a wrapper each. Not for
captured steps: what it plans depends on every row's length.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.limits import MIB

WORKSPACE_BYTES = 128 * MIB
LAYOUT = "NHD"


class FlashInferAttention:
    """Implements `AttentionBackend`. `library` stands in for the package in tests."""

    def __init__(self, pool: KvPool, shape: AttentionShape, library: Any = None) -> None:
        self._pool = pool
        self._shape = shape
        library = library or importlib.import_module("flashinfer")
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        tensor_cores = shape.group >= 4
        self._decode = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, LAYOUT, use_tensor_cores=tensor_cores
        )
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty_like(workspace), LAYOUT
        )
        self._batch: Batch | None = None

    def plan(self, batch: Batch) -> None:
        self._batch = batch
        shape, block_tokens = self._shape, self._pool.shape.block_tokens
        decodes = batch.decodes
        window = -1 if shape.sliding_window is None else shape.sliding_window - 1
        common: dict[str, Any] = {
            "window_left": window,
            "logits_soft_cap": shape.soft_cap or None,
            "q_data_type": self._pool.shape.dtype,
            "kv_data_type": self._pool.shape.dtype,
        }
        heads = (shape.heads, shape.kv_heads, shape.head_dim, block_tokens)
        if decodes:
            pages = self._pages(batch.blocks[:decodes], batch.contexts[:decodes])
            self._decode.plan(*pages, *heads, **common)
        if decodes < len(batch.lengths):
            starts = [start - decodes for start in batch.starts[decodes:]]
            pages = self._pages(batch.blocks[decodes:], batch.contexts[decodes:])
            self._prefill.plan(
                torch.tensor(starts, dtype=torch.int32), *pages, *heads, causal=True, **common
            )

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch = self._batch
        assert batch is not None
        self._pool.write(layer, batch.slots, keys, values)
        kv = (self._pool.keys[layer], self._pool.values[layer])
        decodes = batch.decodes
        parts = []
        if decodes:
            parts.append(self._decode.run(queries[:decodes].contiguous(), kv))
        if decodes < len(batch.lengths):
            parts.append(self._prefill.run(queries[decodes:].contiguous(), kv))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _pages(
        self, blocks: Sequence[Sequence[int]], contexts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Page counts, pages, and how many tokens the last page of each row holds; int32, on the host."""
        size = self._pool.shape.block_tokens
        used = [own[: -(-context // size)] for own, context in zip(blocks, contexts, strict=True)]
        last = [(context - 1) % size + 1 for context in contexts]
        return (
            torch.tensor([0, *accumulate(map(len, used))], dtype=torch.int32),
            torch.tensor(list(chain.from_iterable(used)), dtype=torch.int32),
            torch.tensor(last, dtype=torch.int32),
        )
