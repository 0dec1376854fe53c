"""The torch engine: runs plans over a paged pool, on CPU or CUDA, by the same code.

Owns the order of a tick (moves of KV, frees, starts, then the steps) and the report of every step; which tokens, lanes and blocks
is the plan's. One lane's trouble (non-finite logits, nothing left to draw, a request that this engine cannot run) ends that lane; a plan
that does not fit is refused untouched; anything else is an EngineError and the end of the process. Batch-invariant plans go
another way through the same decoder (invariant.py), and draw lane by lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from superfluid_core.clock import Clock
from superfluid_core.engine.base import EngineInfo, Interrupted, OnStep
from superfluid_core.engine.compose import StepComposer, StepRow
from superfluid_core.engine.torch.attention.base import AttentionBackend
from superfluid_core.engine.torch.attention.registry import is_padded
from superfluid_core.engine.torch.batch import BlockTables, compose_batch
from superfluid_core.engine.torch.checks import EngineBounds, input_fault, plan_flaw, start_fault
from superfluid_core.engine.torch.cuda.ahead import AheadDecoder, Stretch, StretchReport
from superfluid_core.engine.torch.cuda.devices import device_for, use_device
from superfluid_core.engine.torch.cuda.graphs import DecodeGraphs
from superfluid_core.engine.torch.forward import Forward
from superfluid_core.engine.torch.invariant import InvariantForward
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.engine.torch.pooling import Pooler
from superfluid_core.engine.torch.sampler import NOT_FINITE, Sampled, Sampler
from superfluid_core.errors import EngineError, ErrorCode
from superfluid_core.grammar.compiler import Grammars
from superfluid_core.grammar.lanes import NOTHING_LEFT, GrammarFault, LaneMasks, Mask
from superfluid_core.scheduler.plan import LaneFault, StepDone, TickDone, TickOutcome, TickPlan
from superfluid_core.session import TokenLogprobs

OnLogits = Callable[[Sequence[StepRow], Tensor], None]


class Paths(NamedTuple):
    """What computes a step: the decoder with its attention, or tile by tile where that was proven to hold."""

    decoder: Decoder
    attention: AttentionBackend
    invariant: InvariantForward | None
    pooler: Pooler
    graphs: DecodeGraphs | None = None
    compiled: Forward | None = None


@dataclass(slots=True)
class _Tick:
    """The plan in flight."""

    plan: TickPlan
    composer: StepComposer
    tables: BlockTables
    faults: tuple[LaneFault, ...]
    steps: int = 0


class TorchEngine:
    """Implements `Engine`. `on_logits`, when set, sees (rows that sample, their logits) before every draw."""

    def __init__(
        self,
        info: EngineInfo,
        paths: Paths,
        pool: KvPool,
        threads: int,
        clock: Clock,
        grammars: Grammars | None = None,
    ) -> None:
        self._info = info
        self._masks = LaneMasks(grammars)
        self._paths = paths
        self._pool = pool
        self._threads = threads
        self._clock = clock
        self._sampler = Sampler(info.lanes, info.vocabulary, pool.device)
        self._ahead = self._make_ahead(paths, pool)
        self._bounds = EngineBounds(
            lanes=info.lanes,
            blocks=info.blocks,
            block_tokens=info.block_tokens,
            window=info.window,
            vocabulary=info.vocabulary,
            batch_invariant=paths.invariant is not None,
        )
        self._is_closed = False
        self.on_logits: OnLogits | None = None
        self.last_refusal = ""

    def describe(self) -> EngineInfo:
        return self._info

    def close(self) -> None:
        """No plan runs after this."""
        self._is_closed = True
        self._masks.close()

    @torch.inference_mode()
    def run(self, plan: TickPlan, on_step: OnStep, interrupted: Interrupted) -> TickDone:
        """Execute a plan; see `Engine.run`. Why a plan was refused stays in `last_refusal`."""
        began_ns = self._clock.now_ns()
        if self._is_closed:
            raise EngineError("the engine is closed")
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        use_device(self._pool.device)
        flaw = plan_flaw(plan, self._bounds, self._sampler.lanes(), self._pool.parked())
        if flaw is not None:
            self.last_refusal = flaw
            return self._done(plan, TickOutcome.REFUSED, 0, began_ns)
        try:
            tick = self._open(plan)
            outcome = self._run_steps(tick, on_step, interrupted)
        except RuntimeError as error:
            raise EngineError(f"torch: {str(error).splitlines()[0][:200]}") from error
        return self._done(plan, outcome, tick.steps, began_ns)

    def embed(self, ids: Sequence[int], pooling: str) -> Iterator[bytes | None]:
        """Compute a text's vector in short passes; see `Embedder.embed`."""
        use_device(self._pool.device)  # a thread's first work may be a text
        try:
            yield from self._paths.pooler.embed(ids, pooling)
        except RuntimeError as error:
            raise EngineError(f"torch: {str(error).splitlines()[0][:200]}") from error

    @torch.inference_mode()
    def forward_only(self, plan: TickPlan) -> Tensor:
        """Logits of the first step of a plan, nothing sampled: for benches and tests. Writes the KV that it names."""
        tables = BlockTables(plan.lanes, self._info.block_tokens)
        step = StepComposer(plan).next_step()
        rows = [] if step is None else step.rows()
        return self._forward(rows, tables, is_invariant=plan.batch_invariant)

    def bytes_read(self, rows: int) -> int | None:
        """Bytes of weights that a step of so many rows reads, where that is not all of the plain ones: for benches."""
        compiled = self._paths.compiled
        return None if compiled is None else compiled.bytes_read(rows)

    # --- a tick

    def _open(self, plan: TickPlan) -> _Tick:
        """Everything that precedes the first step."""
        pool, sampler = self._pool, self._sampler
        for ticket in plan.park_drop:
            pool.park_drop(ticket)
        for park in plan.park_out:
            pool.park_out(park.ticket, park.blocks)
        for park in plan.park_in:
            pool.park_in(park.ticket, park.blocks)
        pool.copy([copy.source for copy in plan.copies], [copy.target for copy in plan.copies])
        for lane in plan.frees:
            sampler.free(lane)
            self._masks.free(lane)
        faults: dict[int, LaneFault] = {}
        for start in plan.starts:
            fault = start_fault(start, self._bounds) or self._masks.start(start)
            if fault is None:
                sampler.start(start)
            else:
                faults[start.lane] = fault
        for wanted in plan.lanes:
            fault = input_fault(wanted, self._bounds)
            if fault is not None:
                faults.setdefault(wanted.lane, fault)
        composer = StepComposer(plan)
        for number in faults:
            composer.drop(number)
        tables = BlockTables(plan.lanes, self._info.block_tokens)
        return _Tick(plan, composer, tables, tuple(faults.values()))

    def _run_steps(self, tick: _Tick, on_step: OnStep, interrupted: Interrupted) -> TickOutcome:
        while (step := tick.composer.next_step()) is not None:
            if tick.steps and interrupted():
                return TickOutcome.INTERRUPTED
            rows = step.rows()
            if not self._run_ahead(tick, rows, on_step, interrupted):
                on_step(self._step(tick, rows))
                tick.steps += 1
        if tick.faults and not tick.steps:
            on_step(StepDone(tick.plan.tick, 0, (), (), (), 0, 0, None, tick.faults))
        return TickOutcome.COMPLETE

    def _make_ahead(self, paths: Paths, pool: KvPool) -> AheadDecoder | None:
        if paths.graphs is None:
            return None
        cleared = pool if is_padded(paths.attention) else None
        return AheadDecoder(paths.graphs, self._sampler, device_for(pool.device), cleared)

    def _run_ahead(
        self, tick: _Tick, rows: list[StepRow], on_step: OnStep, interrupted: Interrupted
    ) -> bool:
        """Run the steps that hold the same lanes without waiting for any, if these lanes and this device allow it."""
        ahead, steps = self._ahead, tick.composer.steady()
        if ahead is None or not steps or self._masks or self.on_logits is not None:
            return False
        if tick.plan.batch_invariant or not ahead.fits(rows):
            return False
        held = [self._sampler.row(row.lane) for row in rows]
        report = StretchReport(
            tick=tick.plan.tick,
            composer=tick.composer,
            lanes=[row.lane for row in rows],
            judge=lambda lane, token: _lane_fault(lane, token, None),
            stop_ids=[frozenset() if row is None else row.stop_ids for row in held],
            clock=self._clock,
            on_step=on_step,
            steps=tick.steps,
            faults=tick.faults if tick.steps == 0 else (),
            last_ns=self._clock.now_ns(),
        )
        ahead.run(Stretch(rows, self._blocks_of(tick, rows), steps), report, interrupted)
        tick.steps = report.steps
        return True

    def _blocks_of(self, tick: _Tick, rows: list[StepRow]) -> list[tuple[int, ...]]:
        return [tick.tables.blocks[tick.tables.row_of[row.lane]] for row in rows]

    def _step(self, tick: _Tick, rows: list[StepRow]) -> StepDone:
        began_ns = self._clock.now_ns()
        is_invariant = tick.plan.batch_invariant
        logits = self._forward(rows, tick.tables, is_invariant=is_invariant)
        sampling = [row for row in rows if row.samples]
        sampled = Sampled([], None)
        masks: dict[int, Mask | GrammarFault] = {}
        if sampling:
            masks = self._masks.take(row.lane for row in sampling) if self._masks else {}
            if self.on_logits is not None:
                self.on_logits(sampling, logits)
            at_once = 1 if is_invariant else len(sampling)
            sampled = self._sample(sampling, logits, masks, at_once)
        else:
            self._pool.synchronize()
        faults = list(tick.faults) if tick.steps == 0 else []
        good: dict[int, int] = {}
        kept = []
        for number, (row, token) in enumerate(zip(sampling, sampled.ids, strict=True)):
            fault = _lane_fault(row.lane, token, masks.get(row.lane))
            if fault is not None:
                faults.append(fault)
            else:
                good[row.lane] = token
                kept.append(number)
        tick.composer.commit(list(good), list(good.values()))
        self._drop_stopped(tick.composer, good)
        if masks:
            self._masks.advance(good)
        logprobs = sampled.logprobs
        return StepDone(
            tick=tick.plan.tick,
            step=tick.steps,
            lanes=tuple(good),
            ids=tuple(good.values()),
            prefilled=tuple((row.lane, len(row.inputs)) for row in rows if not row.decoding),
            tokens=sum(len(row.inputs) for row in rows),
            elapsed_ns=self._clock.now_ns() - began_ns,
            logprobs=None if logprobs is None else [logprobs[number] for number in kept],
            faults=tuple(faults),
        )

    def _forward(self, rows: list[StepRow], tables: BlockTables, *, is_invariant: bool) -> Tensor:
        if is_invariant:
            assert self._paths.invariant is not None
            return self._paths.invariant.forward(rows, tables)
        if self._ahead is not None and all(row.decoding for row in rows):
            return self._ahead.logits(rows, [tables.blocks[tables.row_of[r.lane]] for r in rows])
        batch = compose_batch(rows, tables, self._pool.device)
        self._pool.clear(batch.fresh)
        if self._paths.compiled is not None:
            return self._paths.compiled(batch)
        return self._paths.decoder.forward(batch, self._paths.attention)

    def _sample(
        self,
        rows: list[StepRow],
        logits: Tensor,
        masks: Mapping[int, Mask | GrammarFault],
        at_once: int,
    ) -> Sampled:
        """Draw for all rows, `at_once` of them in one shape of call."""
        ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            drawn = self._sampler.sample(
                logits[first : first + at_once],
                [row.lane for row in some],
                [row.output_index for row in some],
                [_mask_of(masks.get(row.lane)) for row in some] if masks else None,
            )
            ids += drawn.ids
            logprobs += drawn.logprobs or [None] * len(some)
        return Sampled(ids, logprobs if any(each is not None for each in logprobs) else None)

    def _drop_stopped(self, composer: StepComposer, good: dict[int, int]) -> None:
        """Lanes that drew a stop id decode no further; below the minimum a stop id cannot be drawn."""
        for lane, token in good.items():
            row = self._sampler.row(lane)
            if row is not None and token in row.stop_ids:
                composer.drop(lane)

    def _done(self, plan: TickPlan, outcome: TickOutcome, steps: int, began_ns: int) -> TickDone:
        return TickDone(plan.tick, outcome, steps, self._clock.now_ns() - began_ns)


def _mask_of(found: Mask | GrammarFault | None) -> Mask | None:
    return found if isinstance(found, Mask) else None


def _lane_fault(lane: int, token: int, mask: Mask | GrammarFault | None) -> LaneFault | None:
    """Why a lane cannot go on after its draw: its constraint, or nothing that could be drawn."""
    if isinstance(mask, GrammarFault):
        return LaneFault(lane, mask.code, mask.text)
    if token >= 0:
        return None
    if token == NOT_FINITE:
        return LaneFault(lane, ErrorCode.NAN_LOGITS, "the model's logits are not finite")
    if mask is not None:
        return LaneFault(lane, ErrorCode.INVALID_REQUEST, NOTHING_LEFT)
    return LaneFault(lane, ErrorCode.LANE_FAULT, "no token id is left to choose from")
