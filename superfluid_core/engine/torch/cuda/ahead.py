"""Decoding one step ahead of the host: ids go from the draw into the next step without leaving the device.

Owns a stretch: consecutive steps of a tick over the same lanes, which nothing but their own ids can change. Step n + 1 is launched before
the ids of step n are read, so the device never waits for the host. When a lane ends at step n, what step n + 1 drew for it is
thrown away; its keys went to a place of its own that no context reaches. Whatever needs an id on the host first (a grammar, a bad word of
several ids, log-probabilities) is no matter for a stretch.

    launch 0 | launch 1, read 0 | launch 2, read 1 | ... | read n
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from superfluid_core.clock import Clock
from superfluid_core.engine.base import OnStep
from superfluid_core.engine.compose import StepComposer, StepRow
from superfluid_core.engine.torch.cuda.devices import Device, Pending
from superfluid_core.engine.torch.cuda.graphs import DecodeGraphs, DecodeRow
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.engine.torch.philox import uniforms
from superfluid_core.engine.torch.rows import SamplingRow
from superfluid_core.scheduler.plan import LaneFault, StepDone

STEPS_MAX = 64  # noise is drawn for a whole stretch at once


class AheadSampler(Protocol):
    """The part of the sampler that needs no host."""

    def row(self, lane: int) -> SamplingRow | None: ...

    def is_free_of_host(self, lanes: Sequence[int], indexes: Sequence[int]) -> bool:
        """Whether drawing for these lanes needs nothing that only the host knows."""
        ...

    def draw_on_device(self, logits: Tensor, lanes: Sequence[int], uniform: Tensor) -> Tensor:
        """Draw one id per row, by `uniform` [rows] where it draws; negative where there is none. Overwrites `logits`."""
        ...


Report = Callable[[list[int]], bool]
Judge = Callable[[int, int], LaneFault | None]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that hold the same rows; `steps` at most, if nobody ends early."""

    rows: Sequence[StepRow]
    blocks: Sequence[Sequence[int]]
    steps: int


@dataclass(slots=True)
class StretchReport:
    """Tells a tick's composer and its reader of each step of a stretch, in order. `judge` says what is wrong with a drawn id.

    `faults` go out with the first step. `steps` counts the steps of the tick, those before the stretch included.
    """

    tick: int
    composer: StepComposer
    lanes: Sequence[int]
    judge: Judge
    stop_ids: Sequence[frozenset[int]]
    clock: Clock
    on_step: OnStep
    steps: int
    faults: tuple[LaneFault, ...]
    last_ns: int

    def __call__(self, ids: list[int]) -> bool:
        step = self.composer.next_step()
        if step is None:
            return False  # all had ended when this step was launched
        wanted = set(step.sampling)
        good: dict[int, int] = {}
        ended: list[int] = []
        faults = list(self.faults)
        for lane, token, stops in zip(self.lanes, ids, self.stop_ids, strict=True):
            if lane not in wanted:
                continue
            fault = self.judge(lane, token)
            if fault is not None:
                faults.append(fault)
                continue
            good[lane] = token
            if token in stops:
                ended.append(lane)
        self.composer.commit(list(good), list(good.values()))
        for lane in ended:
            self.composer.drop(lane)
        now_ns = self.clock.now_ns()
        self.on_step(
            StepDone(
                tick=self.tick,
                step=self.steps,
                lanes=tuple(good),
                ids=tuple(good.values()),
                prefilled=(),
                tokens=len(wanted),
                elapsed_ns=now_ns - self.last_ns,
                faults=tuple(faults),
            )
        )
        self.steps += 1
        self.faults = ()
        self.last_ns = now_ns
        return len(good) == len(self.lanes) and not ended


class AheadDecoder:
    """Runs stretches on recorded steps."""

    def __init__(
        self, graphs: DecodeGraphs, sampler: AheadSampler, device: Device, pool: KvPool | None
    ) -> None:
        """`pool` is given where blocks must be zeroed as they are opened, for what reads them in other steps."""
        self._graphs = graphs
        self._sampler = sampler
        self._device = device
        self._pool = pool

    def fits(self, rows: Sequence[StepRow]) -> bool:
        """Whether a step of these rows may begin a stretch."""
        lanes = [row.lane for row in rows]
        indexes = [row.output_index for row in rows]
        return self._sampler.is_free_of_host(lanes, indexes)

    def logits(self, rows: Sequence[StepRow], blocks: Sequence[Sequence[int]]) -> Tensor:
        """Run one decode step for a host that waits for it; logits as `DecodeGraphs.replay`."""
        self._load(rows, blocks, 1)
        return self._graphs.replay()

    def run(self, stretch: Stretch, report: Report, interrupted: Callable[[], bool]) -> None:
        """Run steps until all are done, `report` says that the lanes have changed, or somebody interrupts.

        `report` gets the ids of each step, in order; True goes on. What was launched is reported either way.
        """
        lanes = [row.lane for row in stretch.rows]
        steps = min(stretch.steps, STEPS_MAX)
        noise = self._noise(stretch.rows, lanes, steps)
        self._load(stretch.rows, stretch.blocks, steps)
        waiting: Pending | None = self._launch(lanes, noise[:, 0])
        launched, goes_on = 1, True
        while waiting is not None:
            following = None
            if launched < steps and goes_on and not interrupted():
                following = self._launch(lanes, noise[:, launched])
                launched += 1
            goes_on = report(waiting.ids()) and goes_on
            waiting = following

    def _launch(self, lanes: Sequence[int], uniform: Tensor) -> Pending:
        logits = self._graphs.replay()
        ids = self._sampler.draw_on_device(logits, lanes, uniform)
        pending = self._device.fetch(ids)
        self._graphs.feed(ids)
        return pending

    def _load(self, rows: Sequence[StepRow], blocks: Sequence[Sequence[int]], steps: int) -> None:
        if self._pool is not None:
            size = self._pool.shape.block_tokens
            parts = zip(rows, blocks, strict=True)
            opened = [own[n] for row, own in parts for n in _opened(row.position, steps, size)]
            self._pool.clear(opened)
        self._graphs.load(
            [
                DecodeRow(row.inputs[0], row.position, own)
                for row, own in zip(rows, blocks, strict=True)
            ]
        )

    def _noise(self, rows: Sequence[StepRow], lanes: Sequence[int], steps: int) -> Tensor:
        """Draw what all steps of a stretch draw by, [rows, steps] on the device: the sampler's own numbers."""
        held = [self._sampler.row(lane) for lane in lanes]
        known = [row for row in held if row is not None]
        assert len(known) == len(held), "a lane without a session"
        drawn = uniforms(
            [row.params.seed for row in known],
            [row.choice for row in known],
            [row.output_index for row in rows],
            steps,
        )
        return self._device.upload(drawn, torch.float64)


def _opened(position: int, steps: int, block_tokens: int) -> range:
    """Which of a lane's blocks are written from their first place on, when it decodes so many steps from `position` on."""
    return range(-(-position // block_tokens), (position + steps - 1) // block_tokens + 1)
