"""The torch engine: runs plans over a paged pool, on CPU or CUDA, by the same code.

Owns the order of a tick (moves of KV, frees, starts, then the steps) and the report of every step; which tokens, lanes and blocks
is the plan's. One lane's trouble (non-finite logits, nothing left to draw, a request that this engine cannot run) ends that lane; a plan
that does not fit is refused untouched; anything else is an EngineError and the end of the process. Batch-invariant plans go
another way through the same decoder (invariant.py), and draw lane by lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from superfluid_core.clock import Clock, SystemClock
from superfluid_core.engine.base import Capabilities, EngineInfo, Interrupted, OnStep
from superfluid_core.engine.compose import StepComposer, StepRow
from superfluid_core.engine.torch.attention.base import AttentionBackend, AttentionShape
from superfluid_core.engine.torch.attention.registry import DEFAULT, make_attention
from superfluid_core.engine.torch.batch import BlockTables, compose_batch
from superfluid_core.engine.torch.checks import EngineBounds, input_fault, plan_flaw, start_fault
from superfluid_core.engine.torch.device import (
    Machine,
    PoolWish,
    choose_blocks,
    choose_device,
    choose_dtype,
)
from superfluid_core.engine.torch.invariant import InvariantForward
from superfluid_core.engine.torch.kvcache import KvPool, KvShape, copy_cost
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.engine.torch.pooling import PASS_TOKENS, Pooler
from superfluid_core.engine.torch.sampler import NOT_FINITE, Sampled, Sampler
from superfluid_core.engine.torch.weights import Checkpoint, load_weights
from superfluid_core.errors import ConfigError, EngineError, ErrorCode
from superfluid_core.grammar.compiler import Grammars
from superfluid_core.grammar.lanes import NOTHING_LEFT, GrammarFault, LaneMasks, Mask
from superfluid_core.modelfiles.config import ModelConfig
from superfluid_core.scheduler.plan import LaneFault, StepDone, TickDone, TickOutcome, TickPlan
from superfluid_core.session import Determinism, TokenLogprobs

CODE_VERSION = "1"  # changes whenever the same weights would give other numbers
STEP_TOKENS = {"cpu": 512, "cuda": 2048}

OnLogits = Callable[[Sequence[StepRow], Tensor], None]


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """What an operator may say about this engine; None leaves it to the machine."""

    device: str = "auto"
    dtype: str = "auto"
    lanes: int = 8
    window: int | None = None
    kv_blocks: int | None = None
    kv_memory_bytes: int | None = None
    block_tokens: int = 16
    threads: int | None = None
    step_tokens: int | None = None
    attention: str = DEFAULT


class KvPlace(NamedTuple):
    """Where keys and values lie, and as what."""

    device: torch.device
    dtype: torch.dtype


class Paths(NamedTuple):
    """What computes a step: the decoder with its attention, or tile by tile where that was proven to hold."""

    decoder: Decoder
    attention: AttentionBackend
    invariant: InvariantForward | None
    pooler: Pooler


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
            on_step(self._step(tick, step.rows()))
            tick.steps += 1
        if tick.faults and not tick.steps:
            on_step(StepDone(tick.plan.tick, 0, (), (), (), 0, 0, None, tick.faults))
        return TickOutcome.COMPLETE

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
        batch = compose_batch(rows, tables, self._pool.device)
        self._pool.clear(batch.fresh)
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


def build_torch_engine(
    files: Checkpoint,
    options: TorchOptions,
    clock: Clock | None = None,
    machine: Machine | None = None,
    grammars: Grammars | None = None,
) -> TorchEngine:
    """Load a model and make its engine. Raises ConfigError, EngineError or ModelFilesError with words for a person."""
    machine = machine or Machine()
    config = files.config
    device = choose_device(options.device, machine)
    dtype = choose_dtype(options.dtype, config, device, machine)
    window = config.window if options.window is None else options.window
    if not 1 <= window <= config.window:
        raise ConfigError(f"a window of {window} tokens; this model has at most {config.window}")
    threads = options.threads or machine.threads()
    torch.set_num_threads(threads)
    with torch.inference_mode():
        decoder = Decoder(config, load_weights(files, window, device, dtype))
        pool = _make_pool(config, options, window, KvPlace(device, dtype), machine)
    shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, config.sliding_window)
    attention = make_attention(options.attention, pool, shape)
    clock = clock or SystemClock()
    with torch.inference_mode():
        invariant = InvariantForward(decoder, pool, shape)
        is_invariant = invariant.holds()
        host_copy = copy_cost(pool, clock)
    kind = str(dtype).removeprefix("torch.")
    info = EngineInfo(
        weights_fingerprint=files.weights_fingerprint(),
        text_fingerprint=files.text_fingerprint(),
        engine_build=f"torch {torch.__version__} {kind} {device.type} {options.attention} code {CODE_VERSION}",
        dtype=kind,
        device=str(device),
        vocabulary=config.vocabulary,
        eos_ids=config.eos_ids,
        window=window,
        lanes=options.lanes,
        block_tokens=options.block_tokens,
        blocks=pool.shape.blocks,
        step_tokens=options.step_tokens or STEP_TOKENS[device.type],
        determinism=Determinism.BATCH_INVARIANT if is_invariant else Determinism.NONE,
        capabilities=Capabilities(
            swap=True,
            batch_invariant=is_invariant,
            structured_output=grammars is not None,
            embeddings=True,
        ),
        kv_bytes_per_token=pool.shape.block_bytes // options.block_tokens,
        host_copy_bytes_per_s=host_copy.bytes_per_s,
        host_copy_overhead_ns=host_copy.overhead_ns,
    )
    pass_tokens = min(info.step_tokens, PASS_TOKENS[device.type])
    pooler = Pooler(decoder, pool.shape, device, options.attention, shape, pass_tokens)
    paths = Paths(decoder, attention, invariant if is_invariant else None, pooler)
    return TorchEngine(info, paths, pool, threads, clock, grammars)


def _make_pool(
    config: ModelConfig, options: TorchOptions, window: int, place: KvPlace, machine: Machine
) -> KvPool:
    """Size the pool after the weights are placed, then make it."""
    one = KvShape(
        layers=config.layers,
        blocks=1,
        block_tokens=options.block_tokens,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=place.dtype,
    )
    wish = PoolWish(
        block_bytes=one.block_bytes,
        block_tokens=options.block_tokens,
        tokens_useful=options.lanes * window,
        blocks=options.kv_blocks,
        memory_bytes=options.kv_memory_bytes,
    )
    blocks = choose_blocks(wish, place.device, machine)
    return KvPool(replace(one, blocks=blocks), place.device)
