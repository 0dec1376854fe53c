"""The policies that an operator chooses, as one value; `SchedulerLimits` holds the sizes.

Every choice has the default of scheduler.md. Contradictions are refused here, at start-up, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from superfluid_core.errors import ConfigError
from superfluid_core.limits import SchedulerLimits
from superfluid_core.session import QosClass


class QueueOrder(StrEnum):
    """`--queue-policy`."""

    FIFO = "fifo"
    FAIR = "fair"
    SHORTEST = "shortest"
    PREFIX = "prefix"


class Reserve(StrEnum):
    """`--kv-reserve`: the prompt only, or prompt and the most that may be generated (G4)."""

    PROMPT = "prompt"
    FULL = "full"


class Victim(StrEnum):
    """`--victim`: who yields among equals: the last admitted, or who has least to compute again."""

    LAST = "last"
    LEAST_WORK = "least-work"


@dataclass(frozen=True, slots=True)
class Rules:
    """The operator's choices. `class_lanes` caps lanes per class (S5); 0 is off everywhere."""

    queue_order: QueueOrder = QueueOrder.FIFO
    fair_prompt_weight: int = 1
    fair_output_weight: int = 2
    class_lanes: Mapping[QosClass, int] = field(default_factory=dict)
    tenant_lanes: int = 0
    reserve: Reserve = Reserve.PROMPT
    ttft_slo_ms: int = 0
    thrash_pct: int = 20
    pressure_high_pct: int = 85
    pressure_low_pct: int = 70
    victim: Victim = Victim.LAST
    admit_after_preempt: bool = True
    prefix_shared: bool = False

    def check(self, limits: SchedulerLimits) -> None:
        """Raise ConfigError for sizes that cannot work together."""
        for qos, lanes in self.class_lanes.items():
            if not 1 <= lanes <= limits.lanes:
                raise ConfigError(f"class-lanes {qos.label}={lanes} is outside 1..{limits.lanes}")
        if not 0 <= self.tenant_lanes <= limits.lanes:
            raise ConfigError(f"tenant-lanes {self.tenant_lanes} is outside 0..{limits.lanes}")
        if not 0 < self.pressure_low_pct <= self.pressure_high_pct <= 100:
            raise ConfigError("pressure-low must be above 0 and at most pressure-high (100)")
        if limits.lanes < 1 or limits.step_tokens <= limits.lanes:
            raise ConfigError(
                f"step-tokens {limits.step_tokens} must exceed max-batch {limits.lanes}: "
                "every decoding lane has one token in each step, and prompts need room beside them"
            )
