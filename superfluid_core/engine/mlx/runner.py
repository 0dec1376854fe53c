"""A model of mlx-lm as a `Library`, over a pool of blocks.

Owns the model and the pool. A step becomes a few calls: one for each prompt chunk, without the rows of logits that nobody asked for,
and one for all lanes that sample, a token each. MLX computes when it is told to: each call is evaluated before the next. Everything runs
on one device, named in every call, for MLX keeps its default per thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.mlx.pool import BlockPool, Part, Span
from superfluid_core.errors import EngineError
from superfluid_core.scheduler.plan import TickPlan


class MlxLibrary:
    """Implements `Library`."""

    def __init__(
        self, model: Any, pool: BlockPool, block_tokens: int, vocabulary: int, device: mx.Device
    ) -> None:
        self._model = model
        self._pool: BlockPool | None = pool
        self._block_tokens = block_tokens
        self._vocabulary = vocabulary
        self._device = device
        self._tables: dict[int, tuple[int, ...]] = {}

    def open(self, plan: TickPlan) -> None:
        """Take over the plan's block tables; blocks need nothing else."""
        self._tables = {lane.lane: lane.blocks for lane in plan.lanes}

    def forward(self, rows: Sequence[StepRow]) -> Tensor:
        """Feed a step: prompts one by one up to what samples, then every row that does."""
        with self._errors():
            last = []
            for row in rows:
                end = row.position + len(row.inputs)
                body = row.inputs[:-1] if row.samples else row.inputs
                if body:
                    self._call(
                        [Part(self._tables[row.lane], row.position, row.position + len(body))], body
                    )
                if row.samples:
                    last.append((Part(self._tables[row.lane], end - 1, end), row.inputs[-1]))
            if not last:
                return torch.empty((0, self._vocabulary))
            logits = self._call([part for part, _ in last], [token for _, token in last])
            with mx.stream(self._device):
                found = logits.reshape(len(last), -1).astype(mx.float32)
                mx.eval(found)
            return torch.from_numpy(np.array(found))

    def close(self) -> None:
        self._model = self._pool = None
        mx.clear_cache()

    # --- within

    def _call(self, parts: list[Part], inputs: Sequence[int]) -> mx.array:
        """Run the model once; the logits are computed only when somebody evaluates them."""
        assert self._pool is not None
        with mx.stream(self._device):
            self._pool.span = Span(parts, self._block_tokens)
            ids = mx.array(list(inputs)).reshape(len(parts), -1)
            logits: mx.array = self._model(ids, cache=self._pool.layers)
            mx.eval(self._pool.arrays())
        return logits

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Tell what MLX says in one line: whatever it was, the engine cannot go on."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError) as error:
            raise EngineError(f"mlx: {str(error).splitlines()[0][:200]}") from error
