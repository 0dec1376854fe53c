"""What a run leaves behind: a record per session, a bounded timeline of steps, distributions per cohort.

Large runs keep no sessions: `Cohort` holds counts and distributions only, so memory does not grow with what has finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from superfluid_core.scheduler.stats import SchedulerStats
from superfluid_core.simulator.distribution import Distribution
from superfluid_core.simulator.scenario import Arrival

TIMELINE_MAX = 4_096
SESSIONS_KEPT_MAX = 20_000


@dataclass(slots=True)
class SessionRecord:
    """One session, from its arrival to its end. Times are nanoseconds of the run; None did not happen."""

    arrival: Arrival
    started_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    finished_ns: int | None = None
    rejected: str | None = None
    reason: str | None = None
    cached: int = 0
    output: int = 0
    gap_max_ns: int = 0
    preempted: int = 0

    @property
    def ttft_ns(self) -> int | None:
        return None if self.first_token_ns is None else self.first_token_ns - self.arrival.at_ns

    @property
    def wait_ns(self) -> int | None:
        return None if self.started_ns is None else self.started_ns - self.arrival.at_ns


@dataclass(frozen=True, slots=True)
class Preempted:
    """Who lost its lane at the start of a step, with the blocks and KV tokens that it held."""

    name: str
    blocks: int
    tokens: int


@dataclass(slots=True)
class StepRecord:
    """What one forward pass carried: (name, tokens) of decoding lanes and of prompts; `free` counts KV blocks.

    `preempted` lost their lanes when the step was planned, `finished` ended with it.
    """

    number: int
    start_ns: int
    end_ns: int
    decoding: tuple[str, ...]
    prompts: tuple[tuple[str, int], ...]
    used: int
    free: int
    queued: int
    preempted: tuple[Preempted, ...] = ()
    finished: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Cohort:
    """What happened to sessions of one kind."""

    arrived: int = 0
    rejected: int = 0
    finished: int = 0
    good: int = 0
    output_tokens: int = 0
    good_tokens: int = 0
    ttft: Distribution = field(default_factory=Distribution)
    itl: Distribution = field(default_factory=Distribution)
    wait: Distribution = field(default_factory=Distribution)
    stay: Distribution = field(default_factory=Distribution)


@dataclass(slots=True)
class RunResult:
    """Everything that one case left. `stranded` sessions were alive when nothing could go on."""

    label: str
    flags: dict[str, str]
    unit_ns: int
    sessions: list[SessionRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    cohorts: dict[str, Cohort] = field(default_factory=dict)
    tenants: dict[str, Cohort] = field(default_factory=dict)
    step_count: int = 0
    lane_steps: int = 0
    prompt_tokens: int = 0
    ended_ns: int = 0
    busy_ns: int = 0
    area_ns: int = 0
    stranded: int = 0
    lanes_max: int = 0
    occupancy: Distribution = field(default_factory=Distribution)
    stats: SchedulerStats | None = None

    def session(self, name: str) -> SessionRecord:
        for record in self.sessions:
            if record.arrival.name == name:
                return record
        raise KeyError(name)

    def units(self, nanoseconds: int | float) -> float:
        return nanoseconds / self.unit_ns

    @property
    def all(self) -> Cohort:
        """Return the sums over all classes and cohorts."""
        total = Cohort()
        for each in self.cohorts.values():
            total.arrived += each.arrived
            total.rejected += each.rejected
            total.finished += each.finished
            total.good += each.good
            total.output_tokens += each.output_tokens
            total.good_tokens += each.good_tokens
            for name in ("ttft", "itl", "wait", "stay"):
                getattr(total, name).merge(getattr(each, name))
        return total

    @property
    def mean_in_system(self) -> float:
        """Sessions in the system, averaged over the run."""
        return self.area_ns / self.ended_ns if self.ended_ns else 0.0

    @property
    def fairness(self) -> float:
        """Jain's index of the tenants' speeds: output tokens over the time that their sessions stayed. 1.0 is equal."""
        speeds = [
            each.output_tokens / each.stay.total
            for each in self.tenants.values()
            if each.stay.total
        ]
        squares = sum(speed * speed for speed in speeds)
        return sum(speeds) ** 2 / (len(speeds) * squares) if squares else 1.0

    @property
    def recompute_ratio(self) -> float:
        """Tokens that were computed again, over those computed for the first time."""
        if self.stats is None:
            return 0.0
        fresh = self.stats.prompt_tokens + self.stats.output_tokens - self.stats.recomputed_tokens
        return self.stats.recomputed_tokens / fresh if fresh else 0.0
