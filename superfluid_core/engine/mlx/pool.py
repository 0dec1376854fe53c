"""A pool of KV blocks in MLX arrays, in the shape that mlx-lm's models expect of a cache.

Owns two arrays a layer. A model asks a layer's cache where it stands (`offset`), what it may see (`make_mask`), and hands it new keys
and values (`update_and_fetch`); all three are answered from the `Span` that was set before the call, so one cache serves every
lane, alone or side by side. Blocks are the scheduler's: a prefix is shared by naming its blocks, and nothing is ever copied.

    position p of a lane lives in row  blocks[p // block_tokens] * block_tokens + p % block_tokens

Rows behind a shorter lane's end repeat its own last row, which its mask hides: what another lane left there never enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Part:
    """Positions `first .. end-1` of a lane, and the blocks that its whole context lies in."""

    blocks: Sequence[int]
    first: int
    end: int

    def rows(self, block_tokens: int) -> Rows:
        """Name the rows of positions 0 .. end-1."""
        count = -(-self.end // block_tokens)
        starts = np.asarray(self.blocks[:count], dtype=np.int32) * block_tokens
        rows = starts[:, None] + np.arange(block_tokens, dtype=np.int32)
        return np.asarray(rows.reshape(-1)[: self.end])


class Span:
    """What one call of the model computes: one part of any length, or several of one position each."""

    def __init__(self, parts: Sequence[Part], block_tokens: int) -> None:
        assert len(parts) == 1 or all(part.end - part.first == 1 for part in parts)
        lines = [part.rows(block_tokens) for part in parts]
        longest = max(part.end for part in parts)
        self.inputs = parts[0].end - parts[0].first
        self._ends = [part.end for part in parts]
        self._firsts = [part.first for part in parts]
        self._longest = longest
        written = [line[part.first :] for line, part in zip(lines, parts, strict=True)]
        self.written = mx.array(np.concatenate(written))
        padded = [np.pad(line, (0, longest - len(line)), mode="edge") for line in lines]
        self.context = mx.array(np.stack(padded))
        self.offset = self._firsts[0] if len(parts) == 1 else mx.array(self._firsts)
        self._masks: dict[int | None, Any] = {}

    def mask(self, window: int | None, *, is_array: bool) -> Any:
        """Say what each position sees: None for everything, "causal" for everything before it, else an array."""
        if not is_array and (window is None or window >= self._longest):
            if len(self._ends) == 1:
                return None if self.inputs == 1 else "causal"
            if min(self._ends) == self._longest:
                return None
        if window not in self._masks:
            self._masks[window] = mx.array(self._seen(window))
        return self._masks[window]

    def _seen(self, window: int | None) -> npt.NDArray[np.bool_]:
        """Make [inputs, positions] of a single part, [parts, 1, 1, positions] of several."""
        keys = np.arange(self._longest)
        if len(self._ends) == 1:
            queries = np.arange(self._firsts[0], self._ends[0])[:, None]
        else:
            queries = np.asarray(self._firsts)[:, None, None, None]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        return np.asarray(seen)


class LayerCache:
    """One layer's keys and values, made when the first ones come. `window`: how far back this layer sees at most."""

    def __init__(self, pool: BlockPool, window: int | None) -> None:
        self._pool = pool
        self._window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> int | mx.array:
        return self._pool.span.offset

    def make_mask(
        self,
        inputs: int,
        *,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        """Answer as mlx-lm's own caches do; its models name both options."""
        assert inputs == self._pool.span.inputs
        return self._pool.span.mask(window_size or self._window, is_array=return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep what is new; give the whole context of every lane of this call."""
        span = self._pool.span
        if self.keys is None or self.values is None:
            self.keys, self.values = self._pool.rows_for(keys), self._pool.rows_for(values)
        self.keys[span.written] = _by_row(keys)
        self.values[span.written] = _by_row(values)
        found = self.keys[span.context], self.values[span.context]
        return found[0].transpose(0, 2, 1, 3), found[1].transpose(0, 2, 1, 3)


class BlockPool:
    """The caches of all layers. `windows` is parallel to the layers."""

    def __init__(self, windows: Sequence[int | None], blocks: int, block_tokens: int) -> None:
        self._rows = blocks * block_tokens
        self.layers = [LayerCache(self, window) for window in windows]
        self.span = Span([Part((0,), 0, 1)], block_tokens)

    def rows_for(self, new: mx.array) -> mx.array:
        """Make the rows of a layer in the form of what comes first: [parts, heads, inputs, width]."""
        return mx.zeros((self._rows, new.shape[1], new.shape[3]), new.dtype)

    def dtype(self) -> mx.Dtype:
        """Tell the widest type that a model has handed over; at least one call has been made."""
        return max((array.dtype for array in self.arrays()), key=lambda each: each.size)

    def arrays(self) -> list[mx.array]:
        """Everything that is held, for the evaluation that ends a call."""
        both = (array for layer in self.layers for array in (layer.keys, layer.values))
        return [array for array in both if array is not None]


def _by_row(new: mx.array) -> mx.array:
    """Bring [parts, heads, inputs, width] to a row per position."""
    parts, heads, inputs, width = new.shape
    return new.transpose(0, 2, 1, 3).reshape(parts * inputs, heads, width)
