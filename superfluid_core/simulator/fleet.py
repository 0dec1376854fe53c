"""Many nodes, each with a scheduler of its own, and one head that places sessions by the product's placement code.

The head knows what a head knows: load reports a quarter of a second apart, and its own reservations since. What finds no
node waits in the head, first come first served. Memory is bounded by what is live: of finished sessions only distributions remain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from superfluid_core.errors import ConfigError
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.placement.policies import Policy, Refusal
from superfluid_core.placement.reserve import Reservation, fold_load, place
from superfluid_core.placement.view import (
    FleetView,
    Load,
    NodeView,
    Offer,
    PlacementLimits,
    PlacementRequest,
)
from superfluid_core.scheduler.plan import Submit
from superfluid_core.session import QosClass
from superfluid_core.simulator.costs import CostModel, StepLoad, parse_cost
from superfluid_core.simulator.draws import Draws
from superfluid_core.simulator.flags import MS, Flags
from superfluid_core.simulator.fleet_report import FleetResult
from superfluid_core.simulator.fleet_watch import Placed, Watch
from superfluid_core.simulator.hardware import SECOND_NS
from superfluid_core.simulator.node import VirtualNode
from superfluid_core.simulator.run import MODEL, spec_of
from superfluid_core.simulator.scenario import Arrival

REPORT_NS = 250 * MS
WAITING_MAX = 1 << 20
PREFIXES = 16
# one session in two starts with a text that others share
SHARED_SHARE = 0.5
PREFIX_TOKENS = 128
CLASSES = (
    (0.15, QosClass.INTERACTIVE),
    (0.25, QosClass.COMPLETION),
    (0.80, QosClass.AGENT),
    (1.00, QosClass.BACKGROUND),
)
# large blocks: names, and what the prefix cache remembers, are a quarter of those of 16 tokens
NODE = Flags(
    limits=SchedulerLimits(lanes=32, step_tokens=1_024, queue_max=4_096),
    pool=PoolShape(64, 512, 16_384),
    cost="roofline(h100, 8b, 50)",
)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What to simulate. `prompt` and `output` are means in tokens; `load` is offered work over what the fleet can do."""

    nodes: int = 10
    sessions: int = 10_000
    policy: Policy = Policy.LOAD_AWARE
    prompt: int = 300
    output: int = 60
    load: float = 0.8
    seed: int = 1
    flags: Flags = field(default=NODE)


class _Node:
    """A scheduler and what the head knows of it."""

    def __init__(self, index: int, plan: FleetPlan, cost: CostModel, result: FleetResult) -> None:
        flags = plan.flags
        limits, pool = flags.limits, flags.pool
        offer = Offer("simulated", pool.window, limits.lanes, pool.block_tokens, pool.blocks)
        self.index = index
        self.view = NodeView(f"node{index}", {MODEL: offer}, is_up=True)
        self.watch = Watch(result)
        self.virtual = VirtualNode(flags, self.watch, cost)
        self.report_ns = REPORT_NS * (index % 97) // 97
        self.is_due = False

    def report(self, now_ns: int) -> None:
        """Tell the head, as a node does every quarter of a second; what was placed before is in it."""
        scheduler = self.virtual.scheduler
        report = scheduler.load()
        # a head would follow which prefixes are warm where; this one places by load alone
        scheduler.drain_prefix_changes()
        load = Load(
            report.lanes_busy,
            sum(report.queued),
            report.queued_tokens,
            report.blocks_used,
            report.blocks,
            report.prefill_rate,
            report.decode_rates,
        )
        fold_load(self.view, load, self.watch.reservations())
        self.report_ns += max(1, (now_ns - self.report_ns) // REPORT_NS + 1) * REPORT_NS


def capacity_per_s(plan: FleetPlan, cost: CostModel) -> float:
    """Sessions a second that one node can do: every lane decodes, prompts come on top."""
    lanes = plan.flags.limits.lanes
    context = plan.prompt + plan.output // 2
    step_ns = cost.step_ns(StepLoad(lanes, 0, context * lanes))
    with_prompt_ns = cost.step_ns(StepLoad(lanes, plan.prompt, context * lanes))
    session_ns = plan.output * step_ns / lanes + max(0, with_prompt_ns - step_ns)
    return SECOND_NS / session_ns


def arrivals(plan: FleetPlan, rate_per_s: float) -> Iterator[Arrival]:
    """Draw sessions: exponential gaps and lengths, mixed classes, some with shared beginnings."""
    draws = Draws(plan.seed)
    longest = plan.flags.pool.window // 4
    at_ns = 0.0
    for _ in range(plan.sessions):
        at_ns += draws.exponential(SECOND_NS / rate_per_s)
        prompt = min(longest, 1 + round(draws.exponential(plan.prompt - 1)))
        output = min(longest, 1 + round(draws.exponential(plan.output - 1)))
        kind = draws.double()
        qos = next(qos for share, qos in CLASSES if kind < share)
        shared = draws.double() < SHARED_SHARE
        prefix = 1 + draws.below(PREFIXES)
        yield Arrival(
            round(at_ns),
            prompt,
            output,
            name="-",
            qos=qos,
            prefix=prefix if shared else 0,
            prefix_tokens=PREFIX_TOKENS if shared else 0,
        )


class _Fleet:
    """One run: events in order of time, over all nodes."""

    def __init__(self, plan: FleetPlan, on_end: Callable[[], None]) -> None:
        cost = parse_cost(plan.flags.cost, plan.flags.unit_ns)
        self._plan = plan
        self._rate = capacity_per_s(plan, cost) * plan.nodes * plan.load
        self.result = FleetResult(str(plan.policy), plan.nodes, self._rate)
        self._nodes = [_Node(index, plan, cost, self.result) for index in range(plan.nodes)]
        self._by_name = {node.view.name: node for node in self._nodes}
        self._view = FleetView({node.view.name: node.view for node in self._nodes})
        self._limits = PlacementLimits()
        self._events: list[tuple[int, int]] = []
        self._reports = [(node.report_ns, index) for index, node in enumerate(self._nodes)]
        self._waiting: deque[tuple[Arrival, int]] = deque()
        self._draws = Draws(plan.seed + 1)
        self._on_end = on_end
        self._ended = 0
        self._number = 0

    def run(self) -> FleetResult:
        for arrival in arrivals(self._plan, self._rate):
            self._advance(arrival.at_ns)
            self._number += 1
            self._arrive(arrival, self._number)
        self._advance(None)
        for node in self._nodes:
            self.result.add_stats(node.virtual.scheduler.stats())
        assert not self._waiting, "sessions were left in the head"
        return self.result

    # --- events -----------------------------------------------------------------------------------

    def _advance(self, until_ns: int | None) -> None:
        """Run steps and reports up to a time, or to the end of all work."""
        events, reports = self._events, self._reports
        while events:
            at_ns, index = events[0]
            if until_ns is not None and at_ns > until_ns:
                break
            while reports[0][0] <= at_ns:
                self._report(reports)
            heappop(events)
            self._step(index, at_ns)
        while until_ns is not None and reports[0][0] <= until_ns:
            self._report(reports)

    def _report(self, reports: list[tuple[int, int]]) -> None:
        at_ns, index = heappop(reports)
        node = self._nodes[index]
        node.report(at_ns)
        self.result.reports += 1
        heappush(reports, (node.report_ns, index))

    def _step(self, index: int, at_ns: int) -> None:
        node = self._nodes[index]
        node.virtual.complete()
        self.result.ended_ns = at_ns
        self._go_on(index, at_ns)
        ended = node.watch.take_ended()
        if ended:
            for _ in range(ended):
                self._on_end()
            self._place_waiting(at_ns)

    def _go_on(self, index: int, now_ns: int) -> None:
        virtual = self._nodes[index].virtual
        if virtual.proceed(now_ns):
            assert virtual.ends_ns is not None, "a step that began has an end"
            heappush(self._events, (virtual.ends_ns, index))

    # --- placing ----------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival, number: int) -> None:
        self.result.arrived += 1
        if self._waiting or not self._place(arrival, number, arrival.at_ns):
            if len(self._waiting) >= WAITING_MAX:
                raise ConfigError("the fleet cannot keep up: lower --load or add nodes")
            self.result.waited += 1
            self._waiting.append((arrival, number))
            self.result.waiting_max = max(self.result.waiting_max, len(self._waiting))

    def _place_waiting(self, now_ns: int) -> None:
        while self._waiting and self._place(*self._waiting[0], now_ns):
            self._waiting.popleft()

    def _place(self, arrival: Arrival, number: int, now_ns: int) -> bool:
        request = PlacementRequest(
            MODEL, arrival.prompt, 0, arrival.output, arrival.qos, self._plan.output
        )
        placed = place(
            self._view,
            request,
            self._plan.policy,
            self._limits,
            draw=self._draws.double(),
            now_ns=now_ns,
        )
        if isinstance(placed, Refusal):
            return False
        node = self._by_name[placed.choice.node]
        self._submit(node, arrival, number, placed.reservation, now_ns)
        return True

    def _submit(
        self, node: _Node, arrival: Arrival, number: int, hold: Reservation, now_ns: int
    ) -> None:
        spec = spec_of(arrival, number)
        node.watch.live[spec.key] = Placed(arrival.at_ns, arrival.qos, hold)
        is_idle = node.virtual.ends_ns is None
        node.virtual.receive((Submit(spec),), now_ns)
        hold.acknowledge()
        if is_idle:
            self._go_on(node.index, now_ns)


def run_fleet(plan: FleetPlan, on_end: Callable[[], None] = lambda: None) -> FleetResult:
    """Simulate one policy. Raises ConfigError for a fleet that cannot keep up."""
    return _Fleet(plan, on_end).run()


def run_policies(plan: FleetPlan) -> list[FleetResult]:
    """Run the same sessions under every policy."""
    return [run_fleet(replace(plan, policy=policy)) for policy in Policy]
