"""How long until a node would give this request its first token, and what that costs the others there.

    seconds = (queued prompt tokens + own uncached tokens) / prefill rate
            + wait for a lane
            + decode slowdown: what one more lane costs those that run and what they cost it, over the expected output

Rates are measured by the nodes. What a node has not measured yet is taken as the mean of those that have, so that a new
node is neither flooded nor shunned. The expected output is learned per model and tenant: `max_tokens` says little.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from superfluid_core.placement.view import NodeView, Offer, PlacementRequest

PREFILL_RATE_UNKNOWN = 2_000.0
STEP_SECONDS_UNKNOWN = 0.030
# A batch that grows by one lane costs at least this share of its step: keeps idle nodes ahead of busy ones.
SLOPE_FLOOR = 0.02
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


@dataclass(frozen=True, slots=True)
class FleetRates:
    """The mean of what is known, used where a node has measured nothing."""

    prefill: float
    decode: tuple[Rates, ...]

    @staticmethod
    def of(nodes: Iterable[NodeView]) -> FleetRates:
        known = [node.load for node in nodes]
        prefill = [load.prefill_rate for load in known if load.prefill_rate > 0.0]
        decode = tuple(load.decode_rates for load in known if usable(load.decode_rates))
        mean = sum(prefill) / len(prefill) if prefill else PREFILL_RATE_UNKNOWN
        return FleetRates(mean, decode)

    def step_seconds(self, own: Rates, lanes: int) -> float:
        """Duration of one decode step over `lanes` lanes: measured, else the mean of the others'."""
        if usable(own):
            return step_seconds(own, lanes)
        if not self.decode:
            return STEP_SECONDS_UNKNOWN * (1.0 + SLOPE_FLOOR * max(0, lanes - 1))
        return sum(step_seconds(rates, lanes) for rates in self.decode) / len(self.decode)


def usable(rates: Rates) -> bool:
    return any(lanes > 0 and rate > 0.0 for lanes, rate in rates)


def step_seconds(rates: Rates, lanes: int) -> float:
    """Interpolate the step's duration in the batch size; beyond the ends, follow the nearest slope, never downwards."""
    points = sorted((count, count / rate) for count, rate in rates if count > 0 and rate > 0.0)
    lanes = max(1, lanes)
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


def estimate(
    node: NodeView, offer: Offer, request: PlacementRequest, rates: FleetRates
) -> Estimate:
    """Seconds until the first token of `request` on `node`, by part."""
    prefill_rate = node.load.prefill_rate if node.load.prefill_rate > 0.0 else rates.prefill
    uncached = max(0, request.context - request.cached.get(node.name, 0))
    prefill = (node.queued_tokens + uncached) / prefill_rate
    decode = node.load.decode_rates
    lanes = max(1, offer.lanes)
    running = min(node.in_progress, lanes)
    output = max(1, request.expected_output)
    alone = rates.step_seconds(decode, 1)
    now = rates.step_seconds(decode, running)
    then = rates.step_seconds(decode, running + 1)
    slowdown = output * (running * max(0.0, then - now) + max(0.0, then - alone))
    waiting = node.in_progress - lanes + 1
    if waiting <= 0:
        return Estimate(prefill, 0.0, slowdown)
    per_lane = output * rates.step_seconds(decode, lanes) / lanes
    return Estimate(prefill, waiting * per_lane, slowdown)


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
