"""What is made at start for recorded decode steps: the trial that says how much memory they need, then the steps themselves.

Owns the choice of the backend that is recorded (the one of eager steps, if it needs no host, else our own kernels) and the widest eager
step. The trial runs on a pool of its own, which is gone before the real one is sized; the real one has a block to spare.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.attention.base import DecodeAttention, Site
from superfluid_core.engine.torch.attention.choose import unfit
from superfluid_core.engine.torch.attention.registry import make_attention
from superfluid_core.engine.torch.batch import BlockTables, compose_batch
from superfluid_core.engine.torch.cuda.devices import device_for
from superfluid_core.engine.torch.cuda.graphs import (
    DecodeGraphs,
    GraphShape,
    OnProgress,
    graph_sizes,
)
from superfluid_core.engine.torch.cuda.memory import CudaMeter, Meter, Reserve, measure_reserve
from superfluid_core.engine.torch.draw import TOP_K_OFF, DrawColumns, draw
from superfluid_core.engine.torch.kvcache import KvPool, KvShape
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.engine.torch.sampler import best_of_rows
from superfluid_core.scheduler.plan import LanePlan

SPARE_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class GraphSetup:
    """`attention` names the backend of eager steps; `one` is a pool of one block; `step_tokens` bounds an eager step."""

    decoder: Decoder
    site: Site
    attention: str
    one: KvShape
    lanes: int
    window: int
    step_tokens: int

    def reserve(self, meter: Meter | None = None, *, is_recorded: bool = True) -> Reserve:
        """Measure what must stay free of KV."""
        meter = meter or CudaMeter(self.site.device)
        found = self._measure(meter, graph_sizes(self.lanes) if is_recorded else ())
        gc.collect()  # recorded steps and what they read hold each other
        meter.used_bytes()  # and torch's cache keeps what they had
        return found

    def _measure(self, meter: Meter, sizes: Sequence[int]) -> Reserve:
        pool, step = self._trial()
        made: list[DecodeGraphs] = []

        def record(size: int) -> None:
            if not made:  # within what is measured: their fixed tensors need memory too
                made.append(self._graphs(pool))
            made[0].record_size(size)

        return measure_reserve(meter, step, record, sizes)

    def warm(self) -> None:
        """Run the widest step once, where nothing is measured: no request waits for a compiler."""
        _, step = self._trial()
        step()

    def record(self, pool: KvPool, on_progress: OnProgress | None = None) -> DecodeGraphs:
        """Record the decode steps over the real pool."""
        graphs = self._graphs(pool)
        graphs.record(on_progress)
        return graphs

    def _graphs(self, pool: KvPool) -> DecodeGraphs:
        """`pool`'s last block is the padding's."""
        name = recorded_backend(self.attention, pool, self.site)
        spare = pool.shape.blocks - SPARE_BLOCKS
        shape = GraphShape(self.lanes, self.window, self.site.block_tokens, spare)
        make = lambda: make_attention(name, pool, self.site.shape)  # noqa: E731 - one per size
        return DecodeGraphs(self.decoder, make, shape, device_for(self.site.device))

    def _trial(self) -> tuple[KvPool, Callable[[], None]]:
        """Make a pool that holds one widest step, and that step: prompts of as many lanes as it takes."""
        size, left = self.site.block_tokens, self.step_tokens
        lengths: list[int] = []
        while left > 0 and len(lengths) < self.lanes:
            lengths.append(min(left, self.window))
            left -= lengths[-1]
        plans, rows, blocks = [], [], 0
        for lane, length in enumerate(lengths):
            own = tuple(range(blocks, blocks + -(-length // size)))
            blocks += len(own)
            plans.append(LanePlan(lane, False, 0, (0,) * length, 1, 0, own))
            rows.append(StepRow(lane, 0, (0,) * length, True, 0, False))
        pool = KvPool(replace(self.one, blocks=blocks + SPARE_BLOCKS), self.site.device)
        batch = compose_batch(rows, BlockTables(plans, size), self.site.device)

        def step() -> None:
            with torch.inference_mode():
                # made anew: a library's workspace is memory that the real one will need
                attention = make_attention(self.attention, pool, self.site.shape)
                self.decoder.forward(batch, attention)
                self._draw()

        return pool, step

    def _draw(self) -> None:
        """Draw for all lanes in both ways, from equal scores, which leave all of a row open."""
        place, config = self.site.device, self.decoder.config
        hidden = torch.zeros((self.lanes, config.hidden), dtype=self.site.dtype, device=place)
        logits = self.decoder.project(hidden).float()
        best_of_rows(logits)
        halves = torch.full((self.lanes,), 0.5, dtype=torch.float64, device=place)
        every = torch.arange(self.lanes, device=place)
        filtered = DrawColumns(
            temperature=torch.ones(self.lanes, device=place),
            top_k=torch.full_like(every, TOP_K_OFF),
            min_p=torch.zeros_like(halves),
            top_p=halves,
            plain=None,
            filtered=every,
            unbounded=True,
        )
        draw(logits, filtered, halves)
        draw(logits, replace(filtered, plain=every, filtered=None), halves)


def recorded_backend(attention: str, pool: KvPool, site: Site) -> str:
    """Choose what decode steps are recorded with."""
    if isinstance(make_attention(attention, pool, site.shape), DecodeAttention):
        return attention
    return "reference" if unfit("triton", site) else "triton"


def recording_gap(attention: str, site: Site) -> str | None:
    """Say why decode steps are better not recorded on a device; None when they are.

    The reference reads a whole window for every row: eager steps of any backend are faster than its recorded ones.
    """
    if site.device.type != "cuda" or attention in ("triton", "reference"):
        return None
    reason = unfit("triton", site)
    return None if reason is None else f"our own attention does not work here, {reason}"
