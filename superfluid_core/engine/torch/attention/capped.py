"""Attention whose scores are bounded by a tanh, written out: torch's fused kernel knows no such cap.

Owns nothing but the arithmetic, in float32. Scores of a long chunk are large, so where they would be, key heads are computed one
after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORES_MAX = 1 << 23  # 32 MiB of float32


def capped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cap: float
) -> Tensor:
    """softmax(cap * tanh(q k / sqrt(d) / cap) + mask) v.

    `queries` [a, b, rows, d], `keys` and `values` [a, b or 1, context, d]; `mask` is [rows, context] or has four dimensions, the first of
    which is `a`.
    """
    count, _, rows, _ = queries.shape
    if count > 1 and count * queries.shape[1] * rows * keys.shape[2] > SCORES_MAX:
        parts = [
            capped_attention(
                queries[at : at + 1],
                keys[at : at + 1],
                values[at : at + 1],
                mask[at : at + 1] if mask.dim() == 4 else mask,
                cap,
            )
            for at in range(count)
        ]
        return torch.cat(parts)
    scores = torch.matmul(queries.float(), keys.float().transpose(-1, -2))
    scores = cap * (scores * (queries.shape[-1] ** -0.5 / cap)).tanh() + mask
    return torch.matmul(scores.softmax(-1), values.float()).to(queries.dtype)
