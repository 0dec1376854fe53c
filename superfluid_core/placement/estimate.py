"""How long until a node would give this request its first token, and what that costs the others there.

    seconds = (queued prompt tokens + own uncached tokens) / prefill rate
            + wait for a lane
            + decode slowdown: what one more lane costs those that run and what they cost it, over the expected output

Rates are measured by the nodes. What a node has not measured yet is taken as the mean of those that have, so that a new
node is neither flooded nor shunned. The expected output is learned per model and tenant: `max_tokens` says little.

All of it is linear in the request, which is why a node's part can be computed once for many requests (`Figures`):

    seconds = backlog + uncached tokens * per_prompt + output tokens * (waiting + slowing)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from superfluid_core.placement.view import NodeView, Offer, PlacementRequest, Work

PREFILL_RATE_UNKNOWN = 2_000.0
STEP_SECONDS_UNKNOWN = 0.030
# A batch that grows by one lane costs at least this share of its step: keeps idle nodes ahead of busy ones.
SLOPE_FLOOR = 0.02
# A shorter hit is the head of a chat template, which all chats share: who had the first chat would get every other one.
HIT_TOKENS_MIN = 64
# What another node holds already costs so many times more: a second copy evicts as much of another prefix, which has to be
# computed again, and does so in its turn. Measured: `superfluid bench scenario prefix`.
COPY_COST = 2
# Prefill rates this near to the model's typical one are that: measurements of equal machines differ, and were the best of
# them always right, an idle node would never be asked, hence never measured, again.
RATE_NOISE = 1.5
LEARNED_KEYS_MAX = 1_024
LEARNED_START = 256.0
LEARNED_WEIGHT = 0.2

Rates = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The parts of a score, in seconds; kept for `why`."""

    prefill: float
    lane_wait: float
    slowdown: float

    @property
    def seconds(self) -> float:
        return self.prefill + self.lane_wait + self.slowdown


class Curve:
    """How long one decode step takes, by the number of lanes: measured points, interpolated, each asked for once."""

    __slots__ = ("_decoding", "_known", "_points", "rates")

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._decoding: dict[tuple[int, int], tuple[float, float]] = {}
        self._points = sorted((n, n / rate) for n, rate in rates if n > 0 and rate > 0.0)
        self._known: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._points)

    def step(self, lanes: int) -> float:
        found = self._known.get(lanes)
        if found is None:
            found = self._known[lanes] = _interpolate(self._points, max(1, lanes))
        return found

    def decoding(self, in_progress: int, lanes: int) -> tuple[float, float]:
        """Seconds a token of output that one more session waits and slows down, with so many in progress."""
        key = (in_progress, lanes)
        found = self._decoding.get(key)
        if found is None:
            found = self._decoding[key] = _decoding(self.step, in_progress, lanes)
        return found


def usable(rates: Rates) -> bool:
    return any(lanes > 0 and rate > 0.0 for lanes, rate in rates)


def step_seconds(rates: Rates, lanes: int) -> float:
    """Interpolate the step's duration in the batch size; beyond the ends, follow the nearest slope, never downwards."""
    return Curve(rates).step(lanes)


def _interpolate(points: Sequence[tuple[int, float]], lanes: int) -> float:
    low = points[0]
    if lanes <= low[0]:
        return low[1] / (1.0 + SLOPE_FLOOR * (low[0] - lanes))
    for high in points[1:]:
        if lanes <= high[0]:
            share = (lanes - low[0]) / (high[0] - low[0])
            return max(low[1], low[1] + share * (high[1] - low[1]))
        low = high
    return low[1] + (lanes - low[0]) * _last_slope(points)


def _last_slope(points: Sequence[tuple[int, float]]) -> float:
    floor = SLOPE_FLOOR * points[-1][1]
    if len(points) < 2:
        return floor
    (count, seconds), (last_count, last_seconds) = points[-2], points[-1]
    return max(floor, (last_seconds - seconds) / (last_count - count))


class FleetRates:
    """The mean of what is known of one model, used where an engine has measured nothing; and what is typical of it."""

    __slots__ = ("_curves", "_known", "prefill", "typical")

    def __init__(
        self, prefill: float, curves: Sequence[Curve], typical: float | None = None
    ) -> None:
        self.prefill = prefill
        self.typical = prefill if typical is None else typical
        self._curves = curves
        self._known: dict[int, float] = {}

    @staticmethod
    def of(works: Iterable[Work]) -> FleetRates:
        known = [work.load for work in works]
        prefill = [load.prefill_rate for load in known if load.prefill_rate > 0.0]
        curves = [Curve(load.decode_rates) for load in known if usable(load.decode_rates)]
        return FleetRates(*mean_and_typical(prefill, curves))

    def rate(self, measured: float) -> float:
        """Say what a node's prefill rate is taken as: its own, the mean for none, what is typical if it is near that."""
        own = measured if measured > 0.0 else self.prefill
        is_typical = self.typical <= own * RATE_NOISE and own <= self.typical * RATE_NOISE
        return self.typical if is_typical else own

    def step(self, lanes: int) -> float:
        """Duration of one decode step over `lanes` lanes, as the mean of the nodes that know."""
        found = self._known.get(lanes)
        if found is None:
            found = self._known[lanes] = self._mean(lanes)
        return found

    def _mean(self, lanes: int) -> float:
        if not self._curves:
            return STEP_SECONDS_UNKNOWN * (1.0 + SLOPE_FLOOR * max(0, lanes - 1))
        return sum(curve.step(lanes) for curve in self._curves) / len(self._curves)


def mean_and_typical(
    prefill: Sequence[float], curves: Sequence[Curve]
) -> tuple[float, Sequence[Curve], float]:
    """Give the arguments of `FleetRates` for what nodes have measured: the typical rate is the (lower) median."""
    if not prefill:
        return PREFILL_RATE_UNKNOWN, curves, PREFILL_RATE_UNKNOWN
    return sum(prefill) / len(prefill), curves, sorted(prefill)[(len(prefill) - 1) // 2]


class Figures(NamedTuple):
    """A node's part of every estimate: seconds, and seconds a token of prompt and of output."""

    backlog: float
    per_prompt: float
    waiting: float
    slowing: float
    per_output: float

    def seconds(self, uncached: int, output: int) -> float:
        return self.backlog + uncached * self.per_prompt + output * self.per_output


def figures(node: NodeView, offer: Offer, curve: Curve, rates: FleetRates) -> Figures:
    """Compute what does not depend on the request. `curve` is the engine's own."""
    work = node.work(offer)
    per_prompt = 1.0 / rates.rate(work.load.prefill_rate)
    lanes = max(1, offer.lanes)
    in_progress = work.in_progress
    if curve.is_known:
        waiting, slowing = curve.decoding(in_progress, lanes)
    else:
        waiting, slowing = _decoding(rates.step, in_progress, lanes)
    backlog = work.queued_tokens * per_prompt
    return Figures(backlog, per_prompt, waiting, slowing, waiting + slowing)


def _decoding(step: Callable[[int], float], in_progress: int, lanes: int) -> tuple[float, float]:
    """Seconds a token of output: the wait for a lane, and what one more lane costs those that run and they it."""
    running = min(in_progress, lanes)
    now, then = step(running), step(running + 1)
    slowing = running * max(0.0, then - now) + max(0.0, then - step(1))
    ahead = max(0, in_progress - lanes + 1)
    return ahead * step(lanes) / lanes, slowing


def estimate(
    node: NodeView, offer: Offer, request: PlacementRequest, rates: FleetRates
) -> Estimate:
    """Seconds until the first token of `request` on `node`, by part."""
    part = figures(node, offer, Curve(node.work(offer).load.decode_rates), rates)
    uncached = request.context - hit_tokens(request, node.name)
    output = max(1, request.expected_output)
    prefill = part.backlog + uncached * part.per_prompt
    return Estimate(prefill, output * part.waiting, output * part.slowing)


def hit_tokens(request: PlacementRequest, name: str) -> int:
    """Return the tokens of the context that a node holds, if they are enough to matter."""
    cached = request.cached.get(name, 0)
    return min(cached, request.context) if cached >= HIT_TOKENS_MIN else 0


def weighed_tokens(request: PlacementRequest) -> int:
    """Count what a node without a hit would have to compute, and what of it others hold as often again as `COPY_COST` says."""
    longest = min(max(request.cached.values(), default=0), request.context)
    return request.context + (COPY_COST * longest if longest >= HIT_TOKENS_MIN else 0)


def weighed_less(weighed: int, hit: int) -> int:
    """Take off what a node holds: it neither computes nor copies that."""
    return weighed - (1 + COPY_COST) * hit


class OutputLengths:
    """Learns how long outputs are, per model and tenant: a moving average, bounded, oldest use forgotten first."""

    def __init__(self, keys_max: int = LEARNED_KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._learned: OrderedDict[tuple[str, str], float] = OrderedDict()

    def learn(self, model: str, tenant: str, output: int) -> None:
        key = (model, tenant)
        before = self._learned.get(key)
        after = (
            float(output) if before is None else before + LEARNED_WEIGHT * (float(output) - before)
        )
        self._learned[key] = after
        self._learned.move_to_end(key)
        while len(self._learned) > self._keys_max:
            self._learned.popitem(last=False)

    def expect(self, model: str, tenant: str, output_max: int) -> int:
        """Guess the output tokens, never above what the request allows."""
        learned = self._learned.get((model, tenant), LEARNED_START)
        return max(1, min(output_max, round(learned)))
