"""From logits to ids: every sampling lane of a step in one batched call, one transfer to the host.

Owns the lanes' sampling rows and the order of application: allowed ids and grammar mask, logit bias, bad words and stop ids below the
minimum, penalties, temperature, top-k, min-p, top-p, draw. Temperature below 1e-5 is greedy: the best id after penalties,
ties to the lowest. Log-probabilities are of the model's distribution: before any of this.

Which lanes sit together changes rarely, so what is derived from their rows (`_Composition`) is kept until it changes. Noise is drawn
ahead per lane, from (seed, choice, output index) alone: see philox.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superfluid_core.engine.torch.draw import TOP_K_OFF, DrawColumns, best_first, draw
from superfluid_core.engine.torch.masks import GrammarMasks
from superfluid_core.engine.torch.penalties import PenaltyColumns, PenaltyTables
from superfluid_core.engine.torch.philox import uniforms
from superfluid_core.engine.torch.rows import SamplingRow, make_row
from superfluid_core.grammar.lanes import Mask
from superfluid_core.scheduler.plan import LaneStart
from superfluid_core.session import TokenLogprobs

NOT_FINITE = -1
NOTHING_ALLOWED = -2
DRAWS_AHEAD = 32
RUN = 64  # logits of which the largest is found before where it lies


@dataclass(frozen=True, slots=True)
class Sampled:
    """Parallel to the lanes of the call; an id below 0 is NOT_FINITE or NOTHING_ALLOWED."""

    ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


@dataclass(frozen=True, slots=True)
class _Composition:
    """What a step over these lanes needs; row numbers index the step's logits."""

    rows: list[SamplingRow]
    drawing: list[int]
    drawing_index: Tensor | None
    columns: DrawColumns | None
    static: tuple[Tensor, Tensor] | None
    penalties: PenaltyColumns | None
    banning: list[int]
    logprobs: list[int]
    logprobs_best: int


class Sampler:
    """Rows of the lanes, and the batched draw."""

    def __init__(self, lanes: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._rows: dict[int, SamplingRow] = {}
        self._tables = PenaltyTables(lanes, vocabulary, device)
        self._draws = torch.zeros((lanes, DRAWS_AHEAD), dtype=torch.float64, device=device)
        self._draws_first: dict[int, int] = {}
        self._grammar = GrammarMasks(vocabulary, device)
        self._cached: tuple[tuple[int, ...], _Composition] | None = None

    def start(self, start: LaneStart) -> None:
        """Take a session into its lane, with everything that its outputs so far imply."""
        row = make_row(start, self._vocabulary, self._device)
        if row.is_penalized:
            self._tables.start(start.lane, start.spec.prompt, start.outputs)
        self._rows[start.lane] = row
        self._draws_first.pop(start.lane, None)
        self._cached = None

    def free(self, lane: int) -> None:
        """Forget a lane."""
        self._rows.pop(lane, None)
        self._draws_first.pop(lane, None)
        self._cached = None

    def lanes(self) -> list[int]:
        """Lanes that hold a session."""
        return list(self._rows)

    def row(self, lane: int) -> SamplingRow | None:
        """Find the row of a lane that holds a session."""
        return self._rows.get(lane)

    def sample(
        self,
        logits: Tensor,
        lanes: Sequence[int],
        indexes: Sequence[int],
        masks: Sequence[Mask | None] | None = None,
    ) -> Sampled:
        """Draw output `indexes[i]` of `lanes[i]` from row i of float32 `logits`, which is overwritten.

        `masks`, parallel to the lanes, are what grammars leave; rows without one are not touched for it.
        """
        plan = self._compose(lanes)
        model = logits[plan.logprobs].log_softmax(-1) if plan.logprobs else None
        over: frozenset[int] = frozenset()
        if masks is not None:
            self._grammar.apply(logits, masks)
            over = frozenset(n for n, mask in enumerate(masks) if mask is not None and mask.is_over)
        self._mask(logits, plan, indexes, over)
        uniform = None if plan.columns is None else self._noise(plan, lanes, indexes)
        ids, best = self._choose(logits, plan, uniform)
        logprobs = None if model is None else self._logprobs(model, ids, plan)
        found: list[int] = _marked(ids, best).tolist()
        for number in plan.banning:
            if plan.rows[number].bad_words and found[number] >= 0:
                plan.rows[number].remember(found[number])
        return Sampled(found, logprobs)

    def is_free_of_host(self, lanes: Sequence[int], indexes: Sequence[int]) -> bool:
        """Whether drawing for these lanes, now and later, needs nothing that only the host knows. See cuda/ahead.py."""
        plan = self._compose(lanes)
        return not plan.logprobs and not any(
            plan.rows[n].bad_words or indexes[n] < plan.rows[n].min_output for n in plan.banning
        )

    def draw_on_device(self, logits: Tensor, lanes: Sequence[int], uniform: Tensor) -> Tensor:
        """Do what `sample` does for lanes that are free of the host; `uniform` is [rows]. Nobody waits for the device."""
        plan = self._compose(lanes)
        if plan.static is not None:
            logits.index_add_(0, *plan.static)
        mine = uniform if plan.drawing_index is None else uniform[plan.drawing_index]
        return _marked(*self._choose(logits, plan, mine))

    # --- the parts of a step

    def _choose(
        self, logits: Tensor, plan: _Composition, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Ids, and the best value of each row; `uniform` is for the rows that draw."""
        if plan.penalties is not None:
            self._tables.apply(logits, plan.penalties)
        best, ids = best_of_rows(logits)
        if plan.columns is not None:
            assert uniform is not None
            ids = self._draw(logits, ids, plan, uniform)
        if plan.penalties is not None:
            self._tables.add(plan.penalties.lanes, ids[plan.penalties.rows])
        return ids, best

    def _mask(
        self, logits: Tensor, plan: _Composition, indexes: Sequence[int], over: frozenset[int]
    ) -> None:
        """Add biases and ban ids; a grammar that is `over` ends its text, even below the minimum."""
        if plan.static is not None:
            rows, values = plan.static
            logits.index_add_(0, rows, values)
        if not plan.banning:
            return
        rows_banned: list[int] = []
        ids_banned: list[int] = []
        for number in plan.banning:
            if number in over:
                continue
            banned = plan.rows[number].banned_now(indexes[number])
            rows_banned += [number] * len(banned)
            ids_banned += banned
        if ids_banned:
            where = torch.tensor([rows_banned, ids_banned], device=self._device)
            logits[where[0], where[1]] = -torch.inf

    def _draw(
        self, logits: Tensor, best_ids: Tensor, plan: _Composition, uniform: Tensor
    ) -> Tensor:
        """Replace the best id by a drawn one in the rows that draw."""
        assert plan.columns is not None
        if plan.drawing_index is None:
            return draw(logits, plan.columns, uniform)
        drawn = draw(logits[plan.drawing_index], plan.columns, uniform)
        return best_ids.index_copy(0, plan.drawing_index, drawn)

    def _noise(
        self, plan: _Composition, every_lane: Sequence[int], every_index: Sequence[int]
    ) -> Tensor:
        """One number in [0, 1) per drawing lane; lanes that used up theirs get the next DRAWS_AHEAD."""
        lanes = [every_lane[number] for number in plan.drawing]
        indexes = [every_index[number] for number in plan.drawing]
        rows = [plan.rows[number] for number in plan.drawing]
        first = self._draws_first
        stale = [
            at
            for at, (lane, index) in enumerate(zip(lanes, indexes, strict=True))
            if not 0 <= index - first.get(lane, -DRAWS_AHEAD) < DRAWS_AHEAD
        ]
        if stale:
            drawn = uniforms(
                [rows[at].params.seed for at in stale],
                [rows[at].choice for at in stale],
                [indexes[at] for at in stale],
                DRAWS_AHEAD,
            )
            for at in stale:
                first[lanes[at]] = indexes[at]
            refilled = torch.tensor([lanes[at] for at in stale], device=self._device)
            self._draws.index_copy_(0, refilled, drawn.to(self._device))
        offsets = [index - first[lane] for lane, index in zip(lanes, indexes, strict=True)]
        where = torch.tensor([lanes, offsets], device=self._device)
        return self._draws[where[0], where[1]]

    def _logprobs(
        self, model: Tensor, ids: Tensor, plan: _Composition
    ) -> list[TokenLogprobs | None]:
        chosen = model.gather(1, ids[plan.logprobs].unsqueeze(1)).squeeze(1).tolist()
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(plan.logprobs)
        if plan.logprobs_best:
            values, best = best_first(model, max(64, plan.logprobs_best))
            values, best = values[:, : plan.logprobs_best], best[:, : plan.logprobs_best]
            tops = [
                tuple(zip(row_ids, row_values, strict=True))
                for row_ids, row_values in zip(best.tolist(), values.tolist(), strict=True)
            ]
        found: list[TokenLogprobs | None] = [None] * len(plan.rows)
        for number, value, top in zip(plan.logprobs, chosen, tops, strict=True):
            wanted = plan.rows[number].params.logprobs or 0
            found[number] = TokenLogprobs(value, top[:wanted])
        return found

    # --- what follows from the lanes that sit together

    def _compose(self, lanes: Sequence[int]) -> _Composition:
        key = tuple(lanes)
        if self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        rows = [self._rows[lane] for lane in lanes]
        drawing = [n for n, row in enumerate(rows) if not row.params.is_greedy]
        statics = [(n, row.static) for n, row in enumerate(rows) if row.static is not None]
        made = _Composition(
            rows=rows,
            drawing=drawing,
            drawing_index=None if len(drawing) == len(rows) else self._index(drawing),
            columns=self._columns([rows[n] for n in drawing]) if drawing else None,
            static=(
                self._index([n for n, _ in statics]),
                torch.stack([static for _, static in statics]),
            )
            if statics
            else None,
            penalties=self._penalties(key, rows),
            banning=[n for n, row in enumerate(rows) if row.bad_words or row.min_output > 0],
            logprobs=[n for n, row in enumerate(rows) if row.params.logprobs is not None],
            logprobs_best=max((row.params.logprobs or 0 for row in rows), default=0),
        )
        self._cached = (key, made)
        return made

    def _columns(self, rows: list[SamplingRow]) -> DrawColumns:
        params = [row.params for row in rows]
        top_k = [p.top_k if 0 < p.top_k < self._vocabulary else TOP_K_OFF for p in params]
        plain = [n for n, row in enumerate(rows) if not row.is_filtered]
        filtered = [n for n, row in enumerate(rows) if row.is_filtered]
        return DrawColumns(
            temperature=self._reals([p.temperature for p in params]),
            top_k=self._index(top_k),
            min_p=self._shares([p.min_p for p in params]),
            top_p=self._shares([p.top_p for p in params]),
            plain=self._index(plain) if plain else None,
            filtered=self._index(filtered) if filtered else None,
            unbounded=any(top_k[n] == TOP_K_OFF and params[n].min_p <= 0 for n in filtered),
        )

    def _penalties(self, lanes: tuple[int, ...], rows: list[SamplingRow]) -> PenaltyColumns | None:
        which = [n for n, row in enumerate(rows) if row.is_penalized]
        if not which:
            return None
        params = [rows[n].params for n in which]
        return PenaltyColumns(
            rows=self._index(which),
            lanes=self._index([lanes[n] for n in which]),
            repetition=self._reals([p.repetition_penalty for p in params]).unsqueeze(1),
            frequency=self._reals([p.frequency_penalty for p in params]).unsqueeze(1),
            presence=self._reals([p.presence_penalty for p in params]).unsqueeze(1),
        )

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _reals(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _shares(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def best_of_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest value and its lowest id. A CPU finds the largest of a run many times faster than where it lies."""
    rows, vocabulary = logits.shape
    if logits.device.type != "cpu" or vocabulary % RUN or not logits.is_contiguous():
        return logits.max(dim=-1)
    runs = logits.view(rows, -1, RUN)
    best, run = runs.amax(dim=-1).max(dim=-1)
    return best, run * RUN + runs[torch.arange(rows), run].argmax(dim=-1)


def _marked(ids: Tensor, best: Tensor) -> Tensor:
    """Put a mark below 0 where a row had nothing to choose from."""
    return ids.where(best.isfinite(), NOT_FINITE).where(best != -torch.inf, NOTHING_ALLOWED)
