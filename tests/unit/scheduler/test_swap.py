"""`--preempt-mode auto`: what a swap and a recomputation cost, and that the choice between them is the victim's own (S14)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.plan import TickOutcome
from superfluid_core.scheduler.preemption import swap_pays
from superfluid_core.scheduler.rates import Rates
from superfluid_core.scheduler.rules import PreemptMode, Rules
from superfluid_core.session import QosClass
from tests.unit.scheduler.rig import MS, Rig, spec

CHAT, COMPLETION, AGENT, BATCH = QosClass
TOKEN_NS = 194_400
MEMORY_NS = 9_000_000
GPU = PoolShape(16, 1_000, 1 << 16, 131_072, 31.5e9, 10_000)


def roofline_rates(lanes: int = 9) -> Rates:
    """A device on which a step takes 9 ms or 0.1944 ms a token, whichever is longer; a few steps of it were seen."""
    rates = Rates()
    rates.on_step(lanes, 0, MEMORY_NS)
    for prompt in (4_096, 2_048, 512):
        rates.on_step(lanes, prompt, (prompt + lanes) * TOKEN_NS)
    return rates


def test_a_short_context_rides_for_nothing_and_a_long_one_costs_its_tokens() -> None:
    rates = roofline_rates()
    room = MEMORY_NS // TOKEN_NS - 9
    assert rates.riding_ns(room - 1, 9) == 0
    assert rates.riding_ns(2_000, 9) == pytest.approx((2_009) * TOKEN_NS - MEMORY_NS, rel=0.01)
    assert Rates().riding_ns(2_000, 9) == 0, "nothing was measured"


def test_where_every_token_is_paid_for_nothing_rides_for_long() -> None:
    """Measured on a CPU: a step of 7 lanes takes 57 ms, and about 45 ms and 1 ms a token with a prompt beside them."""
    rates = Rates()
    rates.on_step(7, 0, 57 * MS)
    for prompt in (16, 64, 128, 256):
        rates.on_step(7, prompt, (45 + prompt + 7) * MS)
    assert rates.riding_ns(16, 7) == pytest.approx(11 * MS, rel=0.01)
    assert rates.riding_ns(64, 7) == pytest.approx(59 * MS, rel=0.01)


def test_the_published_example_swaps_and_its_short_end_is_computed_again() -> None:
    rates = roofline_rates()
    assert swap_pays(GPU, rates, 2_000, 9)
    assert not swap_pays(GPU, rates, 16, 9)
    crossover = next(n for n in range(1, 2_000) if swap_pays(GPU, rates, n, 9))
    assert crossover == 40


def test_a_dearer_copy_moves_the_crossover_up() -> None:
    rates = roofline_rates()
    slow = PoolShape(16, 1_000, 1 << 16, 131_072, 31.5e9, 10_000_000)
    assert not swap_pays(slow, rates, 100, 9)
    assert swap_pays(slow, rates, 200, 9)


steps = st.tuples(st.integers(0, 64), st.integers(0, 4_096), st.integers(1, 10**9))


@given(
    seen=st.lists(steps, max_size=12),
    lanes=st.integers(1, 64),
    token_bytes=st.integers(1, 1 << 20),
    rate=st.sampled_from([0.0, 1.0, 1e6, 1e9, 3e10]),
    overhead_ns=st.sampled_from([0, 10_000, 5_000_000]),
)
def test_whatever_was_measured_swapping_pays_from_one_length_on(
    seen: list[tuple[int, int, int]], lanes: int, token_bytes: int, rate: float, overhead_ns: int
) -> None:
    rates = Rates()
    for decoded, prompt, elapsed_ns in seen:
        rates.on_step(decoded, prompt, elapsed_ns)
    shape = PoolShape(16, 100, 1 << 20, token_bytes, rate, overhead_ns)
    lengths = (0, 1, 2, 3, 5, 8, 16, 64, 256, 1_024, 4_096, 65_536, 1 << 20)
    choices = [swap_pays(shape, rates, tokens, lanes) for tokens in lengths]
    assert choices == sorted(choices), "recompute, then swap"
    assert not choices[0], "nothing to move"
    adds = [rates.riding_ns(tokens, lanes) for tokens in lengths]
    assert adds == sorted(adds)


def test_of_two_victims_at_the_same_time_the_long_one_is_swapped_and_the_short_one_is_not() -> None:
    """A step of two lanes takes 10 ms, a prompt 1 ms a token: 6 tokens ride for nothing, 120 take longer than two copies."""
    shape = PoolShape(4, 80, 400, 1, 1e4, 1_000_000)
    rules = Rules(park=True, park_bytes=4_000, preempt_mode=PreemptMode.AUTO)
    rig = Rig(SchedulerLimits(lanes=2, step_tokens=256), shape, rules)
    rates = rig.state.rates
    rates.on_step(2, 0, 10 * MS)
    rates.on_step(2, 200, 200 * MS)
    rates.on_step(2, 100, 100 * MS)
    rig.submit(spec(1, 120, 40), spec(2, 6, 40))
    rig.launch()
    rig.step()
    rig.submit(spec(3, 4, 30, CHAT), spec(4, 4, 30, CHAT))
    rig.end(TickOutcome.INTERRUPTED)
    plan = rig.launch()
    assert plan is not None
    assert sorted(rig.running()) == [3, 4]
    (out,) = plan.park_out
    assert len(out.blocks) == 30, "120 positions of the long one"
    stats = rig.scheduler.stats()
    assert (stats.preempted_for_class, stats.swapped_for_class) == (2, 1)
    rig.end(TickOutcome.INTERRUPTED)
    rig.run()
    rig.expect_oracle()
