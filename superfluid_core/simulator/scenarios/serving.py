"""What users see: a chat among agents, a burst that shares its prefix, prompts over the step budget."""

from __future__ import annotations

from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.rules import PrefillMode, Rules
from superfluid_core.session import QosClass
from superfluid_core.simulator.flags import Flags
from superfluid_core.simulator.scenario import Arrival, Case, Figure, Results, Scenario, figure
from superfluid_core.simulator.scenarios.words import MS_NS, ms

COST = "roofline(rtx4090, 8b-q4, 50)"
POOL = PoolShape(16, 9_000, 32_768)

# --- agents-and-chat ------------------------------------------------------------------------------

AGENTS = 8
CHAT = Arrival(2_000 * MS_NS, 200, 50, name="chat", qos=QosClass.INTERACTIVE)


def _chat() -> tuple[Case, ...]:
    flags = Flags(limits=SchedulerLimits(lanes=AGENTS), pool=POOL, cost=COST)
    agents = tuple(Arrival(0, 7_500, 200, name=f"agent{n}") for n in range(AGENTS))
    return (Case("alone", flags, (CHAT,)), Case("among 8 agents", flags, (*agents, CHAT)))


def _chat_figures(results: Results) -> tuple[Figure, ...]:
    alone, crowd = results["alone"], results["among 8 agents"]
    own_ns = alone.session("chat").ttft_ns or 0
    ttft_ns = crowd.session("chat").ttft_ns or 0
    step_ns = max(step.end_ns - step.start_ns for step in crowd.steps)
    agents = [each for each in crowd.sessions if each.arrival.name != "chat"]
    done = sum(each.output == each.arrival.output for each in agents)
    return (
        figure("chat alone: first token after", ms(own_ns)),
        figure("among 8 agents: first token after", ms(ttft_ns)),
        figure("longest step", ms(step_ns)),
        figure("at most one step and its own prefill", _yes(ttft_ns <= own_ns + step_ns), "yes"),
        figure("agents that finished", f"{done} of {AGENTS}", "8 of 8"),
        figure("preemptions", str(sum(each.preempted for each in agents))),
    )


def _yes(is_so: bool, /) -> str:  # noqa: FBT001
    return "yes" if is_so else "no"


CHAT_AMONG_AGENTS = Scenario(
    "agents-and-chat",
    "8 agents with 7,500-token prompts at 0 s, one interactive chat at 2 s",
    _chat,
    _chat_figures,
)

# --- shared-prefix --------------------------------------------------------------------------------

PREFIX = 4_986
OWN = 14
BURST = 32


def _burst() -> tuple[Case, ...]:
    flags = Flags(
        limits=SchedulerLimits(lanes=BURST), pool=PoolShape(16, 12_000, 32_768), cost=COST
    )
    total = PREFIX + OWN
    shared = tuple(Arrival(0, total, 20, prefix=1, prefix_tokens=PREFIX) for _ in range(BURST))
    distinct = tuple(Arrival(0, total, 20) for _ in range(BURST))
    return (Case("one prefix", flags, shared), Case("distinct prompts", flags, distinct))


def _burst_figures(results: Results) -> tuple[Figure, ...]:
    shared, distinct = results["one prefix"], results["distinct prompts"]
    # what lies in the last, partly filled block of the prefix is everyone's own
    full = PREFIX // 16 * 16
    own = (PREFIX + OWN - full) * BURST
    times = (shared.prompt_tokens - own) / full
    medians = [result.all.ttft.percentile(50) for result in (shared, distinct)]
    return (
        figure("prompt tokens computed", f"{shared.prompt_tokens} of {(PREFIX + OWN) * BURST}"),
        figure("the prefix was computed", f"{times:g} times", "1 times"),
        figure("one prefix: median first token", ms(medians[0])),
        figure("distinct prompts: median first token", ms(medians[1])),
        figure("ratio of the medians", f"{medians[1] / max(1, medians[0]):.1f}"),
    )


SHARED_PREFIX = Scenario(
    "shared-prefix",
    "32 sessions at once with one 4,986-token prefix, against 32 distinct prompts",
    _burst,
    _burst_figures,
)

# --- oversized-prompts ----------------------------------------------------------------------------

REQUESTS = 60
# these five are larger than every step budget but the last
OVERSIZED = (5, 17, 29, 41, 53)
WHOLE_BUDGET = 512
BUDGETS = (64, 256, 512, 2_048)


def _oversized() -> tuple[Case, ...]:
    arrivals = tuple(
        Arrival(n * 10 * MS_NS, 1_500 if n in OVERSIZED else 100 + 5 * n, 20)
        for n in range(REQUESTS)
    )
    whole = Flags(
        limits=SchedulerLimits(step_tokens=WHOLE_BUDGET),
        rules=Rules(prefill_mode=PrefillMode.MONOLITHIC, hold_oversized=True),
        pool=POOL,
        cost=COST,
    )
    cases = [Case(f"whole prompts, {WHOLE_BUDGET}", whole, arrivals)]
    for budget in BUDGETS:
        flags = Flags(limits=SchedulerLimits(step_tokens=budget), pool=POOL, cost=COST)
        cases.append(Case(f"chunked, {budget}", flags, arrivals))
    return tuple(cases)


def _oversized_figures(results: Results) -> tuple[Figure, ...]:
    return tuple(
        figure(f"{label}: stranded", str(result.stranded), "0" if "chunked" in label else STRANDED)
        for label, result in results.items()
    )


STRANDED = "55"
OVERSIZED_PROMPTS = Scenario(
    "oversized-prompts",
    "60 requests, 5 of them with prompts larger than the step budget, whole and in chunks",
    _oversized,
    _oversized_figures,
)

SCENARIOS = (CHAT_AMONG_AGENTS, SHARED_PREFIX, OVERSIZED_PROMPTS)
