"""An engine without tensors: tokens by hash or by script, time by rates.

Token i of a session is a keyed hash of (prompt ids, engine seed, request seed, choice, i) and of nothing else, so that
a moved, batched, preempted or chunked stream equals the unbroken one: determinism is exact. Greedy requests leave seed and
choice out. What a request forbids (stop ids before `min_output`, banned or disallowed ids, bad words, what its grammar masks) is drawn again;
penalties weigh logits, and there are none here, so they change nothing.

Time: a step costs its prompt tokens at `prefill` tokens a second over all lanes, plus, if any lane decodes, one token at `decode`
tokens a second per lane, however many lanes share it. A rate of 0 is infinitely fast. Waiting is the caller's `pause`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import islice

from superfluid_core.clock import SECOND, Clock
from superfluid_core.engine.base import Capabilities, EngineInfo, Interrupted, OnStep
from superfluid_core.engine.compose import Step, StepComposer, StepRow
from superfluid_core.engine.scores import best_of
from superfluid_core.engine.script import Answer, Fault, Script, ScriptToken, TokenTexts
from superfluid_core.engine.stand_ins import (
    NumberedTexts,
    Pause,
    ThreadPause,
    closers_of,
    draw_masked,
    hashed_scores,
    hashed_vector,
)
from superfluid_core.errors import EngineError, ErrorCode
from superfluid_core.grammar.compiler import Grammars
from superfluid_core.grammar.lanes import NOTHING_LEFT, GrammarFault, LaneMasks, Mask
from superfluid_core.scheduler.plan import (
    LaneFault,
    LaneStart,
    StepDone,
    TickDone,
    TickOutcome,
    TickPlan,
)
from superfluid_core.session import Determinism, SessionSpec, TokenLogprobs

__all__ = ["NumberedTexts", "Pause", "SimEngine", "SimOptions", "ThreadPause"]

BAN_BIAS = -100.0
FORCE_BIAS = 100.0
DRAWS_MAX = 64
HANG_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Shape and speed of the simulated engine, and what compiles its constraints. Rates are tokens a second, 0 is infinitely fast."""

    window: int = 4096
    lanes: int = 8
    block_tokens: int = 16
    blocks: int = 2048
    step_tokens: int = 512
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    seed: int = 0
    eos_probability: float = 0.002
    text_fingerprint: str = ""
    kv_bytes_per_token: int = 2048
    host_copy_bytes_per_s: float = 8e9
    grammars: Grammars | None = field(default=None, repr=False)


@dataclass(slots=True)
class _Lane:
    """What one lane remembers: its key for draws and the outputs that bad words look back on."""

    spec: SessionSpec
    key: bytes
    answer: Answer | None
    outputs: list[int]
    banned: frozenset[int]
    allowed: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]
    fresh: int
    mask: Mask | None = None


def _draw_key(spec: SessionSpec, engine_seed: int) -> bytes:
    """Hash what a session's tokens may depend on."""
    prompt = array("Q", spec.prompt).tobytes()
    seed, choice = (0, 0) if spec.sampling.is_greedy else (spec.sampling.seed, spec.choice)
    head = b"".join(value.to_bytes(8, "little") for value in (engine_seed, seed, choice))
    return blake2b(head + prompt, digest_size=32, person=b"superfluid-sim").digest()


def _numbers(key: bytes, index: int, attempt: int) -> tuple[int, int, int]:
    """Three independent u64 of one draw."""
    data = index.to_bytes(8, "little") + attempt.to_bytes(4, "little")
    digest = blake2b(data, digest_size=24, key=key).digest()
    return (
        int.from_bytes(digest[:8], "little"),
        int.from_bytes(digest[8:16], "little"),
        int.from_bytes(digest[16:], "little"),
    )


class SimEngine:
    """Implements `engine.base.Engine`. `close` may be called from any thread, at any time."""

    def __init__(
        self,
        texts: TokenTexts,
        options: SimOptions,
        clock: Clock,
        *,
        pause: Pause,
        script: Script | None = None,
        crash: Callable[[], None] | None = None,
    ) -> None:
        self._texts = texts
        self._options = options
        self._clock = clock
        self._pause = pause
        self._script = script
        self._crash = crash
        self._masks = LaneMasks(options.grammars)
        self._closers = closers_of(texts)
        eos = set(texts.eos_ids)
        self._ordinary = [token for token in texts.ordinary_ids() if token not in eos]
        if not self._ordinary:
            raise EngineError("the simulated engine needs at least one ordinary token")
        self._lanes: dict[int, _Lane] = {}
        self._ahead_s = 0.0

    def describe(self) -> EngineInfo:
        options = self._options
        identity = (
            options.seed,
            options.eos_probability,
            self._texts.vocabulary,
            self._texts.eos_ids,
            len(self._ordinary),
            options.text_fingerprint,
        )
        return EngineInfo(
            weights_fingerprint=blake2b(repr(identity).encode(), digest_size=8).hexdigest(),
            text_fingerprint=options.text_fingerprint,
            engine_build="sim/1",
            dtype="none",
            device="none",
            vocabulary=self._texts.vocabulary,
            eos_ids=self._texts.eos_ids,
            window=options.window,
            lanes=options.lanes,
            block_tokens=options.block_tokens,
            blocks=options.blocks,
            step_tokens=options.step_tokens,
            determinism=Determinism.EXACT,
            cuts_are_free=True,
            capabilities=Capabilities(
                batch_invariant=True,
                swap=True,
                structured_output=options.grammars is not None,
                embeddings=True,
            ),
            kv_bytes_per_token=options.kv_bytes_per_token,
            host_copy_bytes_per_s=options.host_copy_bytes_per_s,
        )

    def close(self) -> None:
        self._pause.close()
        self._masks.close()

    def run(self, plan: TickPlan, on_step: OnStep, interrupted: Interrupted) -> TickDone:
        began_ns = self._clock.now_ns()
        self._check(plan)
        for lane in plan.frees:
            self._lanes.pop(lane, None)
            self._masks.free(lane)
        for start in plan.starts:
            self._lanes[start.lane] = self._begin(start)
            self._masks.start(start)
        self._move(plan)
        composer = StepComposer(plan)
        steps = 0
        outcome = TickOutcome.COMPLETE
        while (step := composer.next_step()) is not None:
            if steps and interrupted():
                outcome = TickOutcome.INTERRUPTED
                break
            on_step(self._step(plan.tick, steps, step, composer))
            steps += 1
        return TickDone(plan.tick, outcome, steps, self._clock.now_ns() - began_ns)

    def embed(self, ids: Sequence[int], pooling: str) -> Iterator[bytes | None]:
        """Hash a text into a vector or into scores, in passes that take the time of their tokens; see `Embedder.embed`."""
        options = self._options
        for first in range(0, len(ids), options.step_tokens):
            tokens = min(options.step_tokens, len(ids) - first)
            if options.prefill_rate > 0 and not self._pause.wait(tokens / options.prefill_rate):
                raise EngineError("the engine was closed")
            if first + tokens < len(ids):
                yield None
        best = best_of(pooling)
        if best is None:
            yield hashed_vector(ids, pooling, options.seed)
        else:
            yield hashed_scores(ids, best, options.seed, self._texts.vocabulary)

    # --- one step -----------------------------------------------------------------------------

    def _step(self, tick: int, number: int, step: Step, composer: StepComposer) -> StepDone:
        began_ns = self._clock.now_ns()
        rows = step.rows()
        self._spend(rows)
        spent_ns = self._clock.now_ns()
        sampled: dict[int, int] = {}
        logprobs: list[TokenLogprobs | None] = []
        faults: list[LaneFault] = []
        masks = self._masks.take(row.lane for row in rows if row.samples) if self._masks else {}
        for row in rows:
            if not row.samples:
                continue
            lane = self._lanes[row.lane]
            fault = self._fault(row, lane) or _constrain(row.lane, lane, masks.get(row.lane))
            if fault is not None:
                faults.append(fault)
                continue
            token = self._sample(lane, row.output_index)
            if lane.mask is not None and not lane.mask.allows(token):
                faults.append(LaneFault(row.lane, ErrorCode.INVALID_REQUEST, NOTHING_LEFT))
                continue
            sampled[row.lane] = token
            logprobs.append(self._logprobs(lane, row.output_index, token))
        composer.commit(list(sampled), list(sampled.values()))
        if masks:
            self._masks.advance(sampled)
        for fault in faults:
            composer.drop(fault.lane)
        for number_of_lane, token in sampled.items():
            if token in self._lanes[number_of_lane].spec.stop_ids:
                composer.drop(number_of_lane)
        self._ahead_s = (self._clock.now_ns() - spent_ns) / SECOND
        return StepDone(
            tick=tick,
            step=number,
            lanes=tuple(sampled),
            ids=tuple(sampled.values()),
            prefilled=tuple((row.lane, len(row.inputs)) for row in step.prompts),
            tokens=len(step.ids) + step.prompt_tokens,
            elapsed_ns=self._clock.now_ns() - began_ns,
            logprobs=logprobs if any(entry is not None for entry in logprobs) else None,
            faults=tuple(faults),
        )

    def _move(self, plan: TickPlan) -> None:
        """Wait as long as the plan's KV would take to the host's memory and back."""
        options = self._options
        blocks = sum(len(each.blocks) for each in (*plan.park_out, *plan.park_in))
        size = blocks * options.block_tokens * options.kv_bytes_per_token
        if not size or not options.host_copy_bytes_per_s:
            return
        if not self._pause.wait(size / options.host_copy_bytes_per_s):
            raise EngineError("the engine was closed")

    def _spend(self, rows: list[StepRow]) -> None:
        """Wait as long as this step would have taken, less what making up the last one's tokens took: that is no engine's time."""
        decode_s = prompt_s = 0.0
        for row in rows:
            lane = self._lanes[row.lane]
            if row.decoding:
                decode_s = max(decode_s, self._decode_s(lane, row.output_index))
            elif lane.answer is not None and lane.answer.prefill_ms is not None:
                prompt_s += lane.answer.prefill_ms / 1e3 * len(row.inputs) / max(1, lane.fresh)
            elif self._options.prefill_rate > 0:
                prompt_s += len(row.inputs) / self._options.prefill_rate
        if decode_s + prompt_s > 0 and not self._pause.wait(
            max(0.0, decode_s + prompt_s - self._ahead_s)
        ):
            raise EngineError("the engine was closed")

    def _decode_s(self, lane: _Lane, index: int) -> float:
        scripted = _scripted(lane, index)
        if scripted is not None and scripted.delay_ms is not None:
            return scripted.delay_ms / 1e3
        return 1.0 / self._options.decode_rate if self._options.decode_rate > 0 else 0.0

    def _fault(self, row: StepRow, lane: _Lane) -> LaneFault | None:
        answer = lane.answer
        if answer is None or answer.fault is None or row.output_index != answer.fault_at:
            return None
        match answer.fault:
            case Fault.NAN:
                return LaneFault(row.lane, ErrorCode.NAN_LOGITS, "scripted NaN in the logits")
            case Fault.ERROR:
                return LaneFault(row.lane, ErrorCode.LANE_FAULT, "scripted fault of the lane")
            case Fault.CRASH:
                if self._crash is not None:
                    self._crash()
                raise EngineError("scripted crash of the engine")
            case Fault.HANG:
                while self._pause.wait(HANG_PAUSE_S):
                    pass
                raise EngineError("the engine was closed while it hung")

    # --- tokens -------------------------------------------------------------------------------

    def _sample(self, lane: _Lane, index: int) -> int:
        if not lane.words:
            return self._choose(lane, index)
        del lane.outputs[index:]
        token = self._choose(lane, index)
        lane.outputs.append(token)
        return token

    def _choose(self, lane: _Lane, index: int) -> int:
        is_early = index < lane.spec.min_output and not (lane.mask and lane.mask.is_over)
        masked = lane.spec.stop_ids if is_early else frozenset()
        scripted = _scripted(lane, index)
        if scripted is not None and self._may(lane, scripted.token, masked):
            return scripted.token
        end = self._end_id(lane)
        is_over = lane.answer is not None and bool(lane.answer.tokens) and scripted is None
        chance, place, _ = _numbers(lane.key, index, 0)
        ends = is_over or chance < self._options.eos_probability * 2**64
        if end is not None and ends and self._may(lane, end, masked):
            return end
        if lane.mask is None:
            return self._draw(lane, index, masked)
        may = partial(self._may, lane, masked=masked)
        return draw_masked(lane.mask, place, self._closers, may) or self._draw(lane, index, masked)

    def _end_id(self, lane: _Lane) -> int | None:
        """Pick the id that would end this session's text: None when the request ignores it."""
        for token in self._texts.eos_ids:
            if token in lane.spec.stop_ids:
                return token
        return None

    def _draw(self, lane: _Lane, index: int, masked: frozenset[int]) -> int:
        """Take the first permitted of some hashed ordinary ids, else the lowest permitted one."""
        pool = lane.allowed or self._ordinary
        for attempt in range(DRAWS_MAX):
            _, place, _ = _numbers(lane.key, index, attempt)
            token = pool[place % len(pool)]
            if self._may(lane, token, masked):
                return token
        rest = pool if lane.mask is None else lane.mask.ids()
        return next((token for token in rest if self._may(lane, token, masked)), pool[0])

    def _may(self, lane: _Lane, token: int, masked: frozenset[int]) -> bool:
        if token in masked or token in lane.banned:
            return False
        if lane.allowed and token not in lane.allowed:
            return False
        if lane.mask is not None and not lane.mask.allows(token):
            return False
        return not any(
            word[-1] == token and lane.outputs[len(lane.outputs) - len(word) + 1 :] == [*word[:-1]]
            for word in lane.words
        )

    def _logprobs(self, lane: _Lane, index: int, token: int) -> TokenLogprobs | None:
        """Invent log-probabilities that are ordered, finite and the same on every run."""
        wanted = lane.spec.sampling.logprobs
        if wanted is None:
            return None
        scripted = _scripted(lane, index)
        if scripted is not None and lane.answer is not None and lane.answer.logprob is not None:
            logprob = lane.answer.logprob
        else:
            logprob = -0.01 - (_numbers(lane.key, index, 0)[2] % 1_000_000) / 500_000
        rest = min(logprob, math.log(max(1e-9, 1.0 - math.exp(logprob))))
        # one hash for all of them: alternatives are neighbours in the vocabulary, from a hashed place on
        ordinary = self._ordinary
        place = _numbers(lane.key, index, DRAWS_MAX)[1]
        beside = (ordinary[(place + step) % len(ordinary)] for step in range(len(ordinary)))
        others = islice((other for other in beside if other != token), max(0, wanted - 1))
        top = ((token, logprob), *((other, rest - 0.7 * n) for n, other in enumerate(others, 1)))
        return TokenLogprobs(logprob, top[:wanted])

    # --- lanes --------------------------------------------------------------------------------

    def _begin(self, start: LaneStart) -> _Lane:
        spec = start.spec
        bias = spec.sampling.logit_bias
        forced = tuple(token for token, value in bias if value >= FORCE_BIAS)
        words = spec.sampling.bad_words
        single = {word[0] for word in words if len(word) == 1}
        answer = None
        if self._script is not None:
            answer = self._script.find(self._decoded(spec.prompt))
        return _Lane(
            spec=spec,
            key=_draw_key(spec, self._options.seed),
            answer=answer,
            outputs=list(start.outputs),
            banned=frozenset(single | {token for token, value in bias if value <= BAN_BIAS}),
            allowed=forced or spec.sampling.allowed_token_ids,
            words=tuple(word for word in words if len(word) > 1),
            fresh=len(spec.prompt) + len(start.outputs),
        )

    def _decoded(self, prompt: Iterable[int]) -> str:
        return b"".join(map(self._texts.token_bytes, prompt)).decode("utf-8", "replace")

    def _check(self, plan: TickPlan) -> None:
        """Hold a plan against the pool it was made for: a breach is a bug of the scheduler."""
        started = {start.lane for start in plan.starts}
        for lane in plan.lanes:
            assert lane.lane in started or lane.lane in self._lanes, "a lane without a start"
            last = lane.computed + len(lane.inputs) + max(0, lane.grant - 1)
            assert lane.inputs, "a lane without input"
            assert last <= self._options.window, "a plan beyond the window"
            assert last <= len(lane.blocks) * self._options.block_tokens, (
                "positions without a block"
            )
            assert all(0 <= block < self._options.blocks for block in lane.blocks), "no such block"


def _constrain(number: int, lane: _Lane, mask: Mask | GrammarFault | None) -> LaneFault | None:
    """Give a lane the mask of its next id; says why it cannot go on, if its constraint does."""
    if isinstance(mask, GrammarFault):
        return LaneFault(number, mask.code, mask.text)
    lane.mask = mask
    return None


def _scripted(lane: _Lane, index: int) -> ScriptToken | None:
    return None if lane.answer is None else lane.answer.token(index)
