"""What a device can do at all: decode by batch, moving KV against computing it."""

from __future__ import annotations

from dataclasses import replace

from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.rules import Rules
from superfluid_core.session import QosClass
from superfluid_core.simulator.flags import Flags
from superfluid_core.simulator.hardware import Gpu, Model, find_gpu, find_model, transfer_ns
from superfluid_core.simulator.records import RunResult
from superfluid_core.simulator.scenario import Arrival, Case, Figure, Results, Scenario, figure
from superfluid_core.simulator.scenarios.words import MS_NS, ms

CONTEXT = 4_096
BLOCK = 16
WIDE = 1 << 18
BATCHES = (1, 8, 16, 32)


def _pool(gpu: Gpu, model: Model) -> PoolShape:
    """All memory that the weights leave."""
    left = gpu.memory_bytes - model.weight_bytes
    return PoolShape(BLOCK, left // (model.kv_bytes * BLOCK), WIDE)


def _wide(lanes: int, cost: str, pool: PoolShape) -> Flags:
    """Whole prompts in one step: only the decode steps after it are looked at."""
    limits = SchedulerLimits(
        lanes=lanes, step_tokens=WIDE, prefill_budget=WIDE, decode_budget=1, watermark_pct=0
    )
    return Flags(limits=limits, pool=pool, cost=cost)


# --- decode-utilization ---------------------------------------------------------------------------


def _decode() -> tuple[Case, ...]:
    """Let the step after the prompts read contexts of exactly 4,096 tokens."""
    pool = _pool(find_gpu("rtx4090"), find_model("8b-q4"))
    cost = "roofline(rtx4090, 8b-q4)"
    cases = [
        Case(
            f"batch {batch}",
            _wide(batch, cost, pool),
            tuple(Arrival(0, CONTEXT - 1, 2) for _ in range(batch)),
        )
        for batch in BATCHES
    ]
    crowd = tuple(Arrival(0, CONTEXT - 1, 2) for _ in range(48))
    return (*cases, Case("memory", _wide(48, cost, pool), crowd, steps_max=1))


def _decode_figures(results: Results) -> tuple[Figure, ...]:
    goldens = (
        ("5.01", "199", "1.94"),
        ("8.74", "915", "8.90"),
        ("13.00", "1231", "11.96"),
        ("21.52", "1487", "14.45"),
    )
    gpu, model = find_gpu("rtx4090"), find_model("8b-q4")
    figures: list[Figure] = []
    for batch, golden in zip(BATCHES, goldens, strict=True):
        step = results[f"batch {batch}"].steps[1]
        assert len(step.decoding) == batch, "all lanes decode in the step after the prompts"
        seconds = (step.end_ns - step.start_ns) / 1e9
        values = (
            f"{seconds * 1e3:.2f}",
            f"{batch / seconds:.0f}",
            f"{100 * batch * model.flops / (seconds * gpu.flops):.2f}",
        )
        for name, value, known in zip(("step ms", "tok/s", "FLOP %"), values, golden, strict=True):
            figures.append(figure(f"batch {batch}: {name}", value, known))
    lanes = str(results["memory"].lanes_max)
    return (*figures, figure("sequences that fit in 24 GB", lanes, "36"))


DECODE = Scenario(
    "decode-utilization",
    "8.03e9 parameters at 4.5 bit on 165.2 TFLOP/s and 1,008 GB/s, contexts of 4,096 tokens",
    _decode,
    _decode_figures,
)

# --- swap-or-recompute ----------------------------------------------------------------------------

SWAPPED = 2_000
LENGTHS = (8, 16, 32, *range(36, 42), 64, 512, SWAPPED)
RIDERS = 8
HOST_RATES = (315 * 10**8, 10**9)
# what a copy takes beside its bytes: a setting, host-copy-overhead-ns
COPY_NS = 10_000
# when all riders decode, when the victim of a chat has its lane, and when all of it was seen
_LATE_NS = 6_500 * MS_NS
_CHAT_NS = _LATE_NS + 10 * MS_NS
_SEEN_NS = 7_400 * MS_NS


def _recompute_cases() -> tuple[Case, ...]:
    """Compute a context of n tokens alone, and beside a decoding batch of 8; then let `auto` choose for such a victim."""
    gpu, model = find_gpu("rtx4090"), find_model("8b-q4")
    pool = _pool(gpu, model)
    flags = _wide(RIDERS + 1, "roofline(rtx4090, 8b-q4, 50)", pool)
    alone = Case(f"{SWAPPED} tokens alone", flags, (Arrival(0, SWAPPED, 1),))
    beside = [
        Case(
            f"{n} tokens",
            flags,
            (*_riders(), Arrival(_LATE_NS, n, 1, name="again")),
            until_ns=_SEEN_NS,
        )
        for n in LENGTHS
    ]
    autos = [_auto(flags, tokens, rate) for rate in HOST_RATES for tokens in LENGTHS]
    return (alone, *beside, *autos)


def _auto_label(tokens: int, rate: int) -> str:
    return f"auto, {tokens} tokens, {rate / 1e9:g} GB/s"


def _auto(flags: Flags, tokens: int, rate: int) -> Case:
    """Let a chat take the lane of a background session with n tokens, beside riders; its KV may go to the host."""
    pool = replace(
        flags.pool,
        kv_bytes_per_token=find_model("8b-q4").kv_bytes,
        host_copy_bytes_per_s=float(rate),
        host_copy_overhead_ns=COPY_NS,
    )
    victim = Arrival(_LATE_NS, tokens, 400, name="victim", qos=QosClass.BACKGROUND)
    chat = Arrival(_CHAT_NS, 10, 2, name="chat", qos=QosClass.INTERACTIVE)
    return Case(
        _auto_label(tokens, rate),
        replace(flags, pool=pool, rules=Rules(park=True)),
        (*_riders(), victim, chat),
        until_ns=_SEEN_NS,
    )


def _riders() -> tuple[Arrival, ...]:
    return tuple(Arrival(0, CONTEXT, 800, name=f"d{n}") for n in range(RIDERS))


def _swap_figures(results: Results) -> tuple[Figure, ...]:
    gpu, model = find_gpu("rtx4090"), find_model("8b-q4")
    alone_ns = results[f"{SWAPPED} tokens alone"].sessions[0].ttft_ns or 0
    bytes_ns = transfer_ns(2 * SWAPPED * model.kv_bytes, gpu.host)
    figures = [
        figure("swap 2,000 tokens", ms(bytes_ns), "16.6 ms"),
        figure("recompute 2,000 tokens", ms(alone_ns), "388.9 ms"),
        figure("a copy takes beside its bytes", ms(COPY_NS, 3)),
    ]
    for rate in HOST_RATES:
        figures += _choices(results, rate)
    return tuple(figures)


def _choices(results: Results, rate: int) -> list[Figure]:
    """Show both costs and what the scheduler chose, for every length, and from which length on it swaps."""
    kv_bytes = find_model("8b-q4").kv_bytes
    figures: list[Figure] = []
    swapped: list[int] = []
    for length in LENGTHS:
        swap_ns = 2 * COPY_NS + transfer_ns(2 * length * kv_bytes, rate)
        extra_ns = _extra_ns(results, length)
        mode = _mode(results[_auto_label(length, rate)])
        swapped += [length] if mode == "swap" else []
        text = f"{ms(swap_ns, 3)} against {ms(extra_ns, 3)}: auto chooses {mode}"
        figures.append(figure(f"{length} tokens at {rate / 1e9:g} GB/s", text))
    crossover = f"{swapped[0]} tokens" if swapped else "no length"
    longer = [length for length in LENGTHS if swapped and length >= swapped[0]]
    assert swapped == longer, "swapping pays from one length on"
    return [*figures, figure(f"auto at {rate / 1e9:g} GB/s swaps from", crossover)]


def _mode(result: RunResult) -> str:
    """Read what became of the one preempted session: the scheduler's own decision."""
    stats = result.stats
    assert stats is not None, "a run ends with its statistics"
    assert stats.preemptions == 1, "the chat takes the lane, once"
    return "swap" if stats.swapped_for_class else "recompute"


def _extra_ns(results: Results, length: int) -> int:
    """Tell what recomputing adds to the step that carries it, measured by the step before."""
    steps = results[f"{length} tokens"].steps
    place = next(
        n for n, step in enumerate(steps) if any(name == "again" for name, _ in step.prompts)
    )
    with_it, before = steps[place], steps[place - 1]
    return (with_it.end_ns - with_it.start_ns) - (before.end_ns - before.start_ns)


SWAP = Scenario(
    "swap-or-recompute",
    "KV of 131,072 B a token over 31.5 GB/s both ways, or 16.06 GFLOP a token at half of 165.2 TFLOP/s",
    _recompute_cases,
    _swap_figures,
)

# --- disaggregation -------------------------------------------------------------------------------

PROMPTS = (1_024, 8_192, 32_768)
LINKS = ((450, 450 * 10**9), (50, 50 * 10**9), (12.5, 125 * 10**8))


def _disaggregation() -> tuple[Case, ...]:
    flags = _wide(1, "roofline(h100, 8b, 50)", _pool(find_gpu("h100"), find_model("8b")))
    return tuple(Case(f"{n} tokens", flags, (Arrival(0, n, 1),)) for n in PROMPTS)


def _disaggregation_figures(results: Results) -> tuple[Figure, ...]:
    goldens = (
        ("33.3 ms", "0.30 2.68 10.74"),
        ("266.1 ms", "2.39 21.47 85.90"),
        ("1064.2 ms", "9.54 85.90 343.60"),
    )
    model = find_model("8b")
    figures: list[Figure] = []
    for length, (prefill, transfer) in zip(PROMPTS, goldens, strict=True):
        ttft_ns = results[f"{length} tokens"].sessions[0].ttft_ns or 0
        moves = [transfer_ns(length * model.kv_bytes, rate) / MS_NS for _, rate in LINKS]
        text = " ".join(f"{move:.2f}" for move in moves)
        figures += [
            figure(f"{length} tokens: prefill", ms(ttft_ns), prefill),
            figure(f"{length} tokens: transfer ms at 450, 50, 12.5 GB/s", text, transfer),
        ]
    return tuple(figures)


DISAGGREGATION = Scenario(
    "disaggregation",
    "computing a prompt at half of 989 TFLOP/s against moving its KV",
    _disaggregation,
    _disaggregation_figures,
)

SCENARIOS = (DECODE, SWAP, DISAGGREGATION)
