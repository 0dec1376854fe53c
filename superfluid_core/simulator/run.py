"""Runs one case: arrivals in, the scheduler and the cost model between, a `RunResult` out.

The clock jumps from event to event: an arrival, or the end of the step in flight. At equal times the arrivals come
first, then the step's end, then the next plan. Nothing here reads a real clock or draws a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from superfluid_core.scheduler.plan import Submit
from superfluid_core.session import SessionKey, SessionSpec
from superfluid_core.simulator.flags import shown
from superfluid_core.simulator.node import VirtualNode
from superfluid_core.simulator.recorder import Recorder
from superfluid_core.simulator.records import RunResult
from superfluid_core.simulator.scenario import Arrival, Case, Results, Scenario

MODEL = "simulated"
# ids of shared texts and of a session's own text; 32 bits, as in the wire and the block names
PREFIX_IDS = 1 << 20
OWN_IDS = 1 << 24
OnEnd = Callable[[], None]


def spec_of(arrival: Arrival, number: int) -> SessionSpec:
    """Build the session of an arrival: its own text is like no other's, a shared one like all of its name."""
    shared = min(arrival.prefix_tokens, arrival.prompt)
    prompt = (PREFIX_IDS + arrival.prefix,) * shared + (OWN_IDS + number,) * (
        arrival.prompt - shared
    )
    return SessionSpec(
        key=SessionKey("simulator", number),
        model=MODEL,
        prompt=prompt,
        max_output=arrival.output,
        qos=arrival.qos,
        tenant=arrival.tenant,
    )


class _Arrivals:
    """The arrivals, one ahead."""

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self._next = next(arrivals, None)
        self._number = 0

    @property
    def at_ns(self) -> int | None:
        return None if self._next is None else self._next.at_ns

    def take(self) -> tuple[Arrival, int]:
        arrival = self._next
        assert arrival is not None, "nobody is to come"
        self._next = next(self._arrivals, None)
        assert self._next is None or self._next.at_ns >= arrival.at_ns, "arrivals are not in order"
        self._number += 1
        if not arrival.name:
            arrival = replace(arrival, name=f"s{self._number}")
        return arrival, self._number


class Run:
    """One case in progress."""

    def __init__(self, case: Case, on_end: OnEnd = lambda: None) -> None:
        self._case = case
        result = RunResult(case.label, shown(case.flags), case.flags.unit_ns)
        self._recorder = Recorder(result, case.flags, on_end)
        self._node = VirtualNode(case.flags, self._recorder)
        self._arrivals = _Arrivals(iter(case.arrivals))
        self._now_ns = 0

    def run(self) -> RunResult:
        node, limit_ns = self._node, self._case.until_ns
        while not self._is_over():
            if node.ends_ns is None:
                at_ns = self._arrivals.at_ns
                if at_ns is None or (limit_ns is not None and at_ns >= limit_ns):
                    break
                self._now_ns = at_ns
                self._submit(at_ns)
            else:
                if limit_ns is not None and node.ends_ns > limit_ns:
                    self._submit(limit_ns - 1)
                    break
                self._submit(node.ends_ns)
                self._now_ns = node.complete()
            node.proceed(self._now_ns)
        if limit_ns is not None:
            self._now_ns = limit_ns
        return self._recorder.close(self._now_ns, node.scheduler)

    def _is_over(self) -> bool:
        most = self._case.steps_max
        if most is not None and self._recorder.result.step_count >= most:
            return True
        return self._case.until_ns is not None and self._now_ns >= self._case.until_ns

    def _submit(self, until_ns: int) -> None:
        """Hand in all who arrive until then, each at his own time."""
        while (at_ns := self._arrivals.at_ns) is not None and at_ns <= until_ns:
            if self._case.until_ns is not None and at_ns >= self._case.until_ns:
                return
            arrival, number = self._arrivals.take()
            spec = spec_of(arrival, number)
            self._recorder.on_arrival(arrival, spec.key)
            self._node.receive((Submit(spec),), at_ns)


def run_case(case: Case, on_end: OnEnd = lambda: None) -> RunResult:
    return Run(case, on_end).run()


def run_scenario(scenario: Scenario, cases: tuple[Case, ...] | None = None) -> Results:
    """Run all cases of a scenario, in their order."""
    return {case.label: run_case(case) for case in (cases or scenario.cases())}
