"""Decode steps, recorded once per batch size and replayed: a step then costs the host one launch.

Owns the sizes, the fixed tensors that recorded steps read, and which rows of them are real. Sizes are 1, 2, 4, 8 and then every 8, so
padding is at most 7 rows. Rows of padding feed id 0 at position 0 into a spare block behind the scheduler's, and their logits
are never looked at. All sizes read the same tensors, each its first rows; between steps only `feed` changes them, on the device.

    row      0 .. rows-1: lanes | rows .. size-1: padding
    spare    the pool has one block more than the scheduler knows; it is the padding's
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from superfluid_core.engine.torch.attention.base import (
    AttentionBackend,
    DecodeAttention,
    DecodeState,
    FusedAttention,
)
from superfluid_core.engine.torch.batch import Batch
from superfluid_core.engine.torch.cuda.devices import Device, Replay
from superfluid_core.engine.torch.models import Decoder

MakeAttention = Callable[[], AttentionBackend]
OnProgress = Callable[[int, int], None]


def graph_sizes(lanes: int) -> tuple[int, ...]:
    """Batch sizes that are recorded for so many lanes; the last one holds them all."""
    small = [size for size in (1, 2, 4, 8) if size < lanes]
    wide = range(16, lanes, 8) if lanes > 8 else ()
    last = next((size for size in (1, 2, 4, 8) if size >= lanes), -(-lanes // 8) * 8)
    return (*small, *wide, last)


def size_for(rows: int, sizes: Sequence[int]) -> int:
    """Choose the smallest recorded size that holds so many rows."""
    return next(size for size in sizes if size >= rows)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A lane's next step: the id to feed, where, and the lane's blocks."""

    token: int
    position: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Bounds of recorded steps. `spare_block` is the padding's."""

    lanes: int
    window: int
    block_tokens: int
    spare_block: int


class _Planned:
    """A backend that is planned already: what the decoder asks of it again is nothing."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def plan(self, batch: Batch) -> None:
        """Nothing is left to plan: `plan_decode` did."""

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._backend.run(layer, queries, keys, values)


class _PlannedFused(_Planned):
    """The same where the backend turns and stores in one pass."""

    def run_qkv(self, layer: int, qkv: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        return cast("FusedAttention", self._backend).run_qkv(layer, qkv, turn)


class DecodeGraphs:
    """The recorded steps of one decoder and pool. `make` makes an attention backend that is a `DecodeAttention`."""

    def __init__(
        self, decoder: Decoder, make: MakeAttention, shape: GraphShape, device: Device
    ) -> None:
        self.sizes = graph_sizes(shape.lanes)
        self._decoder = decoder
        self._make = make
        self._shape = shape
        self._device = device
        rows, width = self.sizes[-1], -(-shape.window // shape.block_tokens)
        place = decoder.weights.embedding.device
        self._ids = torch.zeros(rows, dtype=torch.int64, device=place)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=place)
        self._slots = torch.zeros(rows, dtype=torch.int64, device=place)
        self._tables = torch.full((rows, width), shape.spare_block, dtype=torch.int32, device=place)
        # what was recorded reads tensors that the steps hold: they are kept although nobody calls them again
        self._steps: dict[int, Callable[[], None]] = {}
        self._replays: dict[int, Replay] = {}
        # logits of all sizes: kept within the recorded steps, each size would have its own
        self._logits = torch.zeros((rows, decoder.config.vocabulary), device=place)
        self._rows = 0

    def record(self, on_progress: OnProgress | None = None) -> None:
        """Record every size, the largest first: the smaller ones then fit into its memory."""
        for done, size in enumerate(reversed(self.sizes), 1):
            self.record_size(size)
            if on_progress is not None:
                on_progress(done, len(self.sizes))

    def record_size(self, size: int) -> None:
        """Record one size; its rows are all padding meanwhile."""
        self._reset()
        step = self._steps[size] = self._step_of(size)
        self._replays[size] = self._device.record(step)

    def load(self, rows: Sequence[DecodeRow]) -> None:
        """Say which lanes decode from now on. The tensors of steps that are under way are written behind them."""
        count, upload = len(rows), self._device.upload
        width = max(len(row.blocks) for row in rows)
        assert width <= self._tables.shape[1], "a lane has more blocks than the window"
        spare = self._shape.spare_block
        tables = [[*row.blocks, *([spare] * (width - len(row.blocks)))] for row in rows]
        self._reset()
        packed = [*(row.token for row in rows), *(row.position for row in rows)]
        moved = upload(packed, torch.int64)
        self._ids[:count].copy_(moved[:count])
        self._positions[:count].copy_(moved[count:])
        self._tables[:count, :width].copy_(upload(torch.tensor(tables), torch.int32))
        self._rows = count

    def replay(self) -> Tensor:
        """Run the step that is loaded; float32 logits [rows, vocabulary], good until the next replay, free to overwrite."""
        size = size_for(self._rows, self.sizes)
        self._replays[size]()
        return self._logits[: self._rows]

    def feed(self, ids: Tensor) -> None:
        """Let the next step feed these ids, each one position on. What is below 0 is no id, and nobody's."""
        self._ids[: self._rows].copy_(ids.clamp(min=0))
        self._positions[: self._rows].add_(1)

    # --- within

    def _reset(self) -> None:
        self._rows = 0
        self._ids.zero_()
        self._positions.zero_()
        self._tables.fill_(self._shape.spare_block)

    def _step_of(self, size: int) -> Callable[[], None]:
        """Make the function that is recorded: from the fixed tensors to logits, without a word from the host."""
        shape = self._shape
        state = DecodeState(
            self._ids[:size],
            self._positions[:size],
            self._slots[:size],
            self._tables[:size],
            shape.window,
        )
        backend = self._make()
        assert isinstance(backend, DecodeAttention), "this backend cannot be recorded"
        backend.plan_decode(state)
        wrapped = _PlannedFused if isinstance(backend, FusedAttention) else _Planned
        planned = wrapped(cast("AttentionBackend", backend))
        batch = _batch_of(state)

        def run() -> None:
            places = (state.positions // shape.block_tokens).unsqueeze(1)
            blocks = state.tables.gather(1, places).squeeze(1).to(torch.int64)
            state.slots.copy_(blocks * shape.block_tokens + state.positions % shape.block_tokens)
            hidden = self._decoder.run_layers(batch, planned)
            self._logits[:size].copy_(self._decoder.project(hidden))

        return run


def _batch_of(state: DecodeState) -> Batch:
    """Make a step of the fixed tensors; its host columns say nothing, for nobody plans with them."""
    size = state.ids.shape[0]
    return Batch(
        ids=state.ids,
        positions=state.positions,
        slots=state.slots,
        sampled=torch.arange(size, device=state.ids.device),
        tables=state.tables,
        blocks=(),
        decodes=size,
        lengths=(1,) * size,
        starts=tuple(range(size + 1)),
        contexts=(1,) * size,
        fresh=(),
    )
