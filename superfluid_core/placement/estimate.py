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

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from superfluid_core.placement.kinds import comparable, kinds_of, speeds_of
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
# Rates this near to the model's typical ones are those: measurements of equal machines differ, and were the best of
# them always right, an idle node would never be asked, hence never measured, again.
RATE_NOISE = 1.5
# A slower engine has measured nothing.
RATE_LEAST = 1e-6
# What is typical is taken of so many nodes.
SAMPLE_MAX = 32
# Batches at which engines are compared that have measured others: two an octave, up to more than any has.
SIZES = tuple(sorted(base << octave for base in (1, 3) for octave in range(16)))
# From here on every lane counts like the one before.
LANES_KNOWN_MAX = 1_024
LEARNED_KEYS_MAX = 1_024
LEARNED_START = 256.0
LEARNED_WEIGHT = 0.2

Rates = tuple[tuple[int, float], ...]
T = TypeVar("T")


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
    """How long one decode step takes, by the number of lanes: what was measured, straightened, then interpolated.

    Measurements are noisy, and by noise a lane seems to cost less than the one before it, or nothing: whoever believed that would
    heap sessions on a node. So what all lanes of a step cost together, lanes * seconds, is taken as the largest convex curve
    below what was measured (a step that stalled is slow, none is fast by accident) that bends as `SLOPE_FLOOR` says:

        lanes * seconds = hull(lanes) + bend * lanes * (lanes - 1), hull(0) = 0

    Between the corners of the hull seconds are interpolated, and no lane costs less than the one before it. Nothing is computed
    before it is asked for. Nothing but `is_known` may be asked of a curve of which nothing is.
    """

    __slots__ = (
        "_bend", "_corners", "_known", "_measured", "_near_among", "_near_to", "_profile", "_slowing", "rates",
    )  # fmt: skip

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._measured = sorted(
            {n: n / rate for n, rate in rates if n > 0 and rate > RATE_LEAST}.items()
        )
        self._corners: list[tuple[int, float]] = []
        self._bend = 0.0
        self._profile: list[tuple[int, float]] = []
        self._known: dict[int, float] = {}
        self._slowing = [0.0]
        self._near_among: tuple[Curve, ...] = ()
        self._near_to: Curve | None = None

    @property
    def is_known(self) -> bool:
        return bool(self._measured)

    def profile(self) -> Sequence[tuple[int, float]]:
        """Return the steps of the batches of `SIZES` that lie between measured ones, or of the next smaller one if none does."""
        if not self._profile:
            smallest, largest = self._measured[0][0], self._measured[-1][0]
            first, end = bisect_left(SIZES, smallest), bisect_right(SIZES, largest)
            self._profile = [(n, self.step(n)) for n in SIZES[min(first, end - 1) : end]]
        return self._profile

    def step(self, lanes: int) -> float:
        """Seconds of one decode step; beyond what was measured the nearest slope is followed."""
        found = self._known.get(lanes)
        if found is None:
            found = self._known[lanes] = self._interpolate(max(1, lanes))
        return found

    def decoding(self, in_progress: int, lanes: int) -> tuple[float, float]:
        """Seconds a token of output that one more session waits and slows down, with so many in progress."""
        running = min(in_progress, lanes, LANES_KNOWN_MAX)
        if running >= len(self._slowing):
            self._slow(running)
        ahead = in_progress - lanes + 1
        return (ahead * self.step(lanes) / lanes if ahead > 0 else 0.0), self._slowing[running]

    def is_near(self, typical: Curve) -> bool:
        """Say whether what was measured differs from `typical` by no more than noise: in smaller and in larger batches alike."""
        return self._apart(typical) <= RATE_NOISE

    def nearest(self, typicals: tuple[Curve, ...]) -> Curve | None:
        """Return the one to which this is nearest, if it is near that."""
        if self._near_among is not typicals:
            found = typicals[0]
            if len(typicals) > 1:
                found = min(typicals, key=self._apart)
            self._near_to = found if self.is_near(found) else None
            self._near_among = typicals
        return self._near_to

    def _apart(self, typical: Curve) -> float:
        """By which factor this differs from `typical`, in smaller or in larger batches, whichever is more.

        The middle of each half decides, the lower of two: a step that stalled once is slow by much, and no step is fast by accident.
        """
        ratios = [seconds / typical.step(lanes) for lanes, seconds in self._measured]
        half = len(ratios) // 2 + 1
        middles = [sorted(part)[(half - 1) // 2] for part in (ratios[:half], ratios[-half:])]
        return max(max(ratio, 1 / ratio) for ratio in middles)

    def is_within(self, share: float, other: Curve) -> bool:
        """Say whether no step of either's batches differs by more than a share of `other`'s."""
        sizes = dict.fromkeys(lanes for each in (self, other) for lanes, _ in each._measured)
        return all(abs(self.step(n) - other.step(n)) <= share * other.step(n) for n in sizes)

    def _slow(self, running: int) -> None:
        """Compute what one more lane costs up to so many that run: what it costs them, and what they cost it."""
        alone, now = self.step(1), self.step(len(self._slowing))
        for count in range(len(self._slowing), running + 1):
            then = self.step(count + 1)
            cost = count * (then - now) + (then - alone)
            self._slowing.append(max(cost, self._slowing[-1] + 2 * self._bend))
            now = then

    def _interpolate(self, lanes: int) -> float:
        if not self._corners:
            self._straighten()
        corners = self._corners
        size, seconds = corners[0]
        if lanes <= size or len(corners) == 1:
            return seconds + (lanes - size) * self._bend
        place = min(bisect_left(corners, (lanes,)), len(corners) - 1)
        size, seconds = corners[place]
        return seconds + (lanes - size) * _slope(corners[place - 1], corners[place])

    def _straighten(self) -> None:
        self._bend = bend = SLOPE_FLOOR * min(
            seconds / (1.0 + SLOPE_FLOOR * (lanes - 1)) for lanes, seconds in self._measured
        )
        hull = [(0, 0.0)]
        for lanes, seconds in self._measured:
            cost = lanes * (seconds - bend * (lanes - 1))
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (lanes, cost)):
                hull.pop()
            hull.append((lanes, cost))
        self._corners = [(lanes, cost / lanes + bend * (lanes - 1)) for lanes, cost in hull[1:]]


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def usable(rates: Rates) -> bool:
    return any(lanes > 0 and rate > RATE_LEAST for lanes, rate in rates)


def step_seconds(rates: Rates, lanes: int) -> float:
    """Seconds of one decode step, by what one engine has measured."""
    return Curve(rates).step(lanes)


UNKNOWN = Curve(((1, 1 / STEP_SECONDS_UNKNOWN),))


class FleetRates:
    """The mean of what is known of one model, used where an engine has measured nothing; and what is typical of each kind of engine.

    The kind of most engines comes first in `typicals` and in `typical_curves`. An engine without its like is of no kind.
    """

    __slots__ = ("curve", "prefill", "typical_curves", "typicals")

    def __init__(self, prefill: Sequence[float], curves: Sequence[Curve]) -> None:
        """Take what engines have measured: rates above 0.0, curves that are known. Of many a sample is enough."""
        self.prefill = PREFILL_RATE_UNKNOWN
        self.typicals: tuple[float, ...] = (PREFILL_RATE_UNKNOWN,)
        self.curve = UNKNOWN
        self.typical_curves: tuple[Curve, ...] = (UNKNOWN,)
        if prefill:
            rates = _sample(prefill)
            self.prefill = sum(rates) / len(rates)
            self.typicals = tuple(map(_middle, _kinds(rates, rates)))
        if curves:
            sample = _sample(curves)
            self.curve = _curve_of(sample, lambda steps: sum(steps) / len(steps))
            self.typical_curves = tuple(map(_typical, _kinds_of_curves(sample)))

    @staticmethod
    def of(works: Iterable[Work]) -> FleetRates:
        known = [work.load for work in works]
        prefill = [load.prefill_rate for load in known if load.prefill_rate > 0.0]
        curves = [Curve(load.decode_rates) for load in known if usable(load.decode_rates)]
        return FleetRates(prefill, curves)

    @property
    def typical(self) -> float:
        return self.typicals[0]

    @property
    def typical_curve(self) -> Curve:
        return self.typical_curves[0]

    def keep_typical(self, before: FleetRates, share: float) -> bool:
        """Go on with what was typical, unless that has moved by more than a share. True when it goes on."""
        rates = _pairs(self.typicals, before.typicals)
        curves = _pairs(self.typical_curves, before.typical_curves)
        is_kept = all(abs(now - then) <= share * then for now, then in rates)
        is_kept = is_kept and all(now.is_within(share, then) for now, then in curves)
        is_kept = is_kept and bool(rates) and bool(curves)
        if is_kept:
            self.typicals, self.typical_curves = before.typicals, before.typical_curves
        return is_kept

    def rate(self, measured: float) -> float:
        """Say what a node's prefill rate is taken as: its own, the mean for none, what is typical of a kind if it is near that."""
        if measured > 0.0:
            nearest = min(self.typicals, key=lambda each: _apart(each, measured))
            return nearest if _apart(nearest, measured) <= RATE_NOISE else measured
        return self.typical if _apart(self.typical, self.prefill) <= RATE_NOISE else self.prefill

    def curve_for(self, measured: Curve) -> Curve:
        """Say the same of a node's steps."""
        if measured.is_known:
            return measured.nearest(self.typical_curves) or measured
        return self.typical_curve if self.curve.is_near(self.typical_curve) else self.curve


def _apart(one: float, other: float) -> float:
    """By which factor, at least 1."""
    return max(one, other) / min(one, other)


def _sample(known: Sequence[T]) -> Sequence[T]:
    """Take every so manieth."""
    return known[:: -(-len(known) // SAMPLE_MAX)]


def _kinds(known: Sequence[T], factors: Sequence[float]) -> list[list[T]]:
    """Return those of each kind that has several; where none has, all are one."""
    kinds = [kind for kind in kinds_of(factors, RATE_NOISE) if len(kind) > 1]
    return [[known[place] for place in sorted(kind)] for kind in kinds] or [list(known)]


def _kinds_of_curves(curves: Sequence[Curve]) -> list[list[Curve]]:
    rows = [curve.profile() for curve in curves]
    places = comparable(rows)
    return _kinds([curves[place] for place in places], speeds_of([rows[place] for place in places]))


def _middle(rates: Sequence[float]) -> float:
    return sorted(rates)[(len(rates) - 1) // 2]


def _typical(curves: Sequence[Curve]) -> Curve:
    return _curve_of(curves, lambda steps: sorted(steps)[len(steps) // 2])


def _curve_of(curves: Sequence[Curve], taken: Callable[[list[float]], float]) -> Curve:
    """Take of every batch's steps what `taken` does, of the engines that have measured about so many lanes."""
    found: dict[int, list[float]] = {}
    for curve in curves:
        for lanes, seconds in curve.profile():
            found.setdefault(lanes, []).append(seconds)
    return Curve(tuple((lanes, lanes / taken(steps)) for lanes, steps in found.items()))


def _pairs(now: Sequence[T], then: Sequence[T]) -> list[tuple[T, T]]:
    """Put kinds beside the same kinds before; none where their number is another."""
    return list(zip(now, then, strict=True)) if len(now) == len(then) else []


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
    waiting, slowing = rates.curve_for(curve).decoding(work.in_progress, max(1, offer.lanes))
    backlog = work.queued_tokens * per_prompt
    return Figures(backlog, per_prompt, waiting, slowing, waiting + slowing)


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
