"""The scheduler's settings of a node: flags of the names in scheduler.md, turned into its limits and rules.

What contradicts itself, or what no engine can do, is refused by the rules themselves, in words. `config.py` puts the table
beside its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from superfluid_core.errors import ConfigError
from superfluid_core.limits import SchedulerLimits
from superfluid_core.options import Option, choice, integer
from superfluid_core.scheduler.rules import (
    Batching,
    PreemptMode,
    PrefillMode,
    QueueOrder,
    Reserve,
    Rules,
    Victim,
)
from superfluid_core.session import QosClass

PRESSURE_FILE = "/proc/pressure/memory"
ON_OFF = ("on", "off")
SCOPES = ("tenant", "shared")
_BIG = 1 << 31
_SIZE = re.compile(r"(\d{1,15})\s*(|[KMGT]i?B?|B)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_LIMITS = SchedulerLimits()
_RULES = Rules()


class ClassLanes(dict[QosClass, int]):
    """Caps of lanes by class, written as they are read."""

    def __str__(self) -> str:
        return ",".join(f"{qos.label}={lanes}" for qos, lanes in self.items())


class FairWeights(NamedTuple):
    """What a token of each kind costs its tenant."""

    prompt: int = _RULES.fair_prompt_weight
    output: int = _RULES.fair_output_weight

    def __str__(self) -> str:
        return f"prompt={self.prompt},output={self.output}"


class TenantWeights(dict[str, int]):
    """Shares of tenants, written as they are read."""

    def __str__(self) -> str:
        return ",".join(f"{tenant}={weight}" for tenant, weight in self.items())


def parse_tenant_weights(text: str) -> TenantWeights:
    """Parse `team-a=2,team-b=1`; weights are 1..1000."""
    weights = TenantWeights(_pairs(text, "NAME=N,NAME=N")) if text.strip() else TenantWeights()
    if any(not 1 <= weight <= 1_000 for weight in weights.values()):
        raise ValueError("a tenant's weight is 1..1000")
    return weights


def parse_size(text: str) -> int:
    """Parse a number of bytes: 1073741824, 512MiB, 8G (powers of 1024)."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"not a size such as 8GiB: {text[:40]!r}")
    unit = found.group(2).upper().removesuffix("B").removesuffix("I")
    value = int(found.group(1)) << (10 * _POWERS[unit])
    if value <= 0:
        raise ValueError("a size above zero is needed")
    return value


def budget(text: str) -> int:
    """Parse a prefill budget: 0 adapts."""
    value: int = integer(0, 4096)(text)
    if 0 < value < 64:
        raise ValueError("a budget is 0 (adaptive) or 64..4096")
    return value


def _pairs(text: str, known: str) -> dict[str, int]:
    """Parse `name=N,name=N`; each name once."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, figure = part.strip().partition("=")
        if not equals or not name or name in found:
            raise ValueError(f"expected {known}, got {text[:60]!r}")
        found[name] = integer(0, _BIG)(figure.strip())
    return found


def parse_class_lanes(text: str) -> ClassLanes:
    """Parse `background=2,agent=6`; aliases count, a class may be named once."""
    caps = ClassLanes()
    if not text.strip():
        return caps
    for name, lanes in _pairs(text, "CLASS=N,CLASS=N").items():
        qos = QosClass.parse(name)
        if qos in caps:
            raise ValueError(f"the class {qos.label} is named twice")
        caps[qos] = lanes
    return caps


def parse_fair_weights(text: str) -> FairWeights:
    """Parse `prompt=1,output=2`; either may be left out."""
    found = _pairs(text, "prompt=N,output=N")
    if set(found) - set(FairWeights._fields):
        raise ValueError(f"expected prompt=N,output=N, got {text[:60]!r}")
    weights = FairWeights(**found)
    if not any(weights) or max(weights) > 1_000_000:
        raise ValueError("weights are 0..1000000, not both 0")
    return weights


_MS = integer(1, 86_400_000)
_PERCENT = integer(1, 100)

SCHEDULING_OPTIONS: tuple[Option, ...] = (
    Option("prefill-budget", "Prompt tokens per tick; 0 adapts.", budget, _LIMITS.prefill_budget, metavar="N"),
    Option("tick-decode-budget", "Decode tokens per tick; 0 scales.", integer(0, _BIG), _LIMITS.decode_budget, metavar="N"),
    Option("tick-target-ms", "Length of a tick when every lane is busy.", _MS, _LIMITS.tick_target_ms, metavar="N"),
    Option("starvation-ticks", "Nominal ticks after which a waiting session rises a class.", integer(1, 10_000),
           _LIMITS.starvation_ticks, metavar="N"),
    Option("max-queue", "Sessions that may wait.", integer(0, 100_000), _LIMITS.queue_max, metavar="N"),
    Option("max-queued-tokens", "Prompt tokens that may wait; 0 is off.", integer(0, _BIG), 0, metavar="N"),
    Option("queue-policy", f"Order within a class: {', '.join(QueueOrder)}.", choice(*QueueOrder),
           _RULES.queue_order.value),
    Option("fair-weights", "What a token costs its tenant under --queue-policy fair.", parse_fair_weights,
           FairWeights(), metavar="prompt=N,output=N"),
    Option("class-lanes", "Most lanes of a class, such as background=2,agent=6.  [default: no caps]", parse_class_lanes,
           metavar="CLASS=N,..."),
    Option("tenant-weights", "Shares of tenants under --queue-policy fair, such as team-a=2,team-b=1.  [default: 1 each]",
           parse_tenant_weights, metavar="NAME=N,..."),
    Option("tenant-lanes", "Most lanes of one tenant; 0 is off.", integer(0, 1024), _RULES.tenant_lanes, metavar="N"),
    Option("kv-reserve", "KV reserved at admission: the prompt, or prompt and max_tokens.", choice(*Reserve),
           _RULES.reserve.value),
    Option("ttft-slo-ms", "Refuse what is predicted to wait longer for its first token; 0 is off.",
           integer(0, 86_400_000), _RULES.ttft_slo_ms, metavar="N"),
    Option("watermark", "Share of the KV pool that admission leaves free, %.", integer(0, 50), _LIMITS.watermark_pct,
           metavar="N"),
    Option("victim", "Who is preempted among equals.", choice(*Victim), _RULES.victim.value),
    Option("admit-after-preempt", "Whether a tick that preempted for room also admits.", choice(*ON_OFF), "on"),
    Option("batching", f"How sessions enter the batch: {', '.join(Batching)}.", choice(*Batching), _RULES.batching.value),
    Option("prefill-mode", f"How prompts are computed: {', '.join(PrefillMode)}.", choice(*PrefillMode),
           _RULES.prefill_mode.value),
    Option("preempt-mode", f"What becomes of a victim's KV: {', '.join(PreemptMode)}.", choice(*PreemptMode),
           _RULES.preempt_mode.value),
    Option("park", "Keep KV that leaves the pool in host memory.", is_flag=True),
    Option("park-bytes", "Most host memory for it, such as 8GiB.  [default: 4GiB]", parse_size, metavar="BYTES"),
    Option("pressure-high", "KV pool occupancy above which cached prefixes are evicted, %.", _PERCENT,
           _RULES.pressure_high_pct, metavar="N"),
    Option("pressure-low", "Occupancy down to which they are evicted, %.", _PERCENT, _RULES.pressure_low_pct, metavar="N"),
    Option("os-pressure", "Heed the host's memory pressure (Linux PSI).", choice(*ON_OFF), "off"),
    Option("os-pressure-file", "Where the kernel tells it.", default=PRESSURE_FILE, metavar="FILE"),
    Option("prefix-scope", "Who may share cached prefixes: tenant, shared.", choice(*SCOPES), "tenant"),
    Option("pin-budget-pct", "Share of the KV pool that pins may keep, %.", integer(0, 90), 50, metavar="N"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What of these settings is not the scheduler's own: `pressure_file` is None when the host is not watched."""

    limits: SchedulerLimits
    rules: Rules
    pressure_file: Path | None
    pin_budget_pct: int


def scheduling_of(value: Mapping[str, Any]) -> Scheduling:
    """Turn parsed settings into limits and rules, and hold them against each other. Raises ConfigError."""
    limits = SchedulerLimits(
        lanes=value["max_batch"],
        queue_max=value["max_queue"],
        queued_tokens_max=value["max_queued_tokens"],
        prefill_budget=value["prefill_budget"],
        decode_budget=value["tick_decode_budget"],
        tick_target_ms=value["tick_target_ms"],
        starvation_ticks=value["starvation_ticks"],
        step_tokens=value["step_tokens"] or max(_LIMITS.step_tokens, value["max_batch"] + 1),
        watermark_pct=value["watermark"],
    )
    rules = _rules(value)
    rules.check(limits)
    path = Path(value["os_pressure_file"]) if value["os_pressure"] == "on" else None
    if path is not None and not path.is_file():
        raise ConfigError(f"--os-pressure on: {path} is not there (a kernel without PSI?)")
    return Scheduling(limits, rules, path, value["pin_budget_pct"])


def _rules(value: Mapping[str, Any]) -> Rules:
    weights: FairWeights = value["fair_weights"]
    return Rules(
        queue_order=QueueOrder(value["queue_policy"]),
        fair_prompt_weight=weights.prompt,
        fair_output_weight=weights.output,
        class_lanes=value["class_lanes"] or ClassLanes(),
        tenant_lanes=value["tenant_lanes"],
        tenant_weights=tuple((value["tenant_weights"] or TenantWeights()).items()),
        reserve=Reserve(value["kv_reserve"]),
        ttft_slo_ms=value["ttft_slo_ms"],
        pressure_high_pct=value["pressure_high"],
        pressure_low_pct=value["pressure_low"],
        victim=Victim(value["victim"]),
        admit_after_preempt=value["admit_after_preempt"] == "on",
        prefix_shared=value["prefix_scope"] == "shared",
        batching=Batching(value["batching"]),
        prefill_mode=PrefillMode(value["prefill_mode"]),
        preempt_mode=PreemptMode(value["preempt_mode"]),
        park=value["park"],
        park_bytes=value["park_bytes"] or _RULES.park_bytes,
    )
