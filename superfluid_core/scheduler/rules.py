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

GIB = 1024**3


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


class Batching(StrEnum):
    """`--batching`: sessions enter whenever a lane is free, or in groups that run to their longest."""

    CONTINUOUS = "continuous"
    STATIC = "static"


class PrefillMode(StrEnum):
    """`--prefill-mode`: prompts in chunks beside decoding, whole in one step, or in passes of their own."""

    CHUNKED = "chunked"
    MONOLITHIC = "monolithic"
    ALTERNATING = "alternating"
    DISAGGREGATED = "disaggregated"


class PreemptMode(StrEnum):
    """`--preempt-mode`: compute a victim's KV again, keep it in host memory, or whichever is faster (S14)."""

    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Rules:
    """The operator's choices. `class_lanes` caps lanes per class (S5); 0 is off everywhere.

    `tenant_weights` are shares under the fair order: a tenant of weight 2 gets twice the tokens of one that is not named (1).

    `hold_oversized` keeps a context that is larger than one step waiting, and its class behind it: what a server without chunks
    does, for comparison only; prefill-mode monolithic alone widens the step.
    `park` gives host memory, at most `park_bytes` of it, to KV that leaves the pool: of preempted sessions and of evicted prefixes.
    """

    queue_order: QueueOrder = QueueOrder.FIFO
    fair_prompt_weight: int = 1
    fair_output_weight: int = 2
    class_lanes: Mapping[QosClass, int] = field(default_factory=dict)
    tenant_lanes: int = 0
    tenant_weights: tuple[tuple[str, int], ...] = ()
    reserve: Reserve = Reserve.PROMPT
    ttft_slo_ms: int = 0
    thrash_pct: int = 20
    pressure_high_pct: int = 85
    pressure_low_pct: int = 70
    victim: Victim = Victim.LAST
    admit_after_preempt: bool = True
    prefix_shared: bool = False
    batching: Batching = Batching.CONTINUOUS
    prefill_mode: PrefillMode = PrefillMode.CHUNKED
    hold_oversized: bool = False
    preempt_mode: PreemptMode = PreemptMode.AUTO
    park: bool = False
    park_bytes: int = 4 * GIB

    def check(self, limits: SchedulerLimits) -> None:
        """Raise ConfigError for sizes that cannot work together."""
        self._check_shares(limits)
        self._check_modes()
        if not 0 < self.pressure_low_pct <= self.pressure_high_pct <= 100:
            raise ConfigError("pressure-low must be above 0 and at most pressure-high (100)")
        if limits.lanes < 1 or limits.step_tokens <= limits.lanes:
            raise ConfigError(
                f"step-tokens {limits.step_tokens} must exceed max-batch {limits.lanes}: "
                "every decoding lane has one token in each step, and prompts need room beside them"
            )

    def _check_shares(self, limits: SchedulerLimits) -> None:
        for qos, lanes in self.class_lanes.items():
            if not 1 <= lanes <= limits.lanes:
                raise ConfigError(f"class-lanes {qos.label}={lanes} is outside 1..{limits.lanes}")
        if any(weight < 1 for _, weight in self.tenant_weights):
            raise ConfigError("a tenant's weight is at least 1")
        if not 0 <= self.tenant_lanes <= limits.lanes:
            raise ConfigError(f"tenant-lanes {self.tenant_lanes} is outside 0..{limits.lanes}")

    def _check_modes(self) -> None:
        if self.prefill_mode is PrefillMode.DISAGGREGATED:
            raise ConfigError(
                "prefill-mode disaggregated: no engine of this version can take over a KV "
                "that was computed elsewhere"
            )
        if self.preempt_mode is PreemptMode.SWAP and not self.park:
            raise ConfigError("preempt-mode swap needs host memory: turn park on")
        if self.hold_oversized and self.prefill_mode is not PrefillMode.MONOLITHIC:
            raise ConfigError("hold-oversized needs prefill-mode monolithic: chunks always fit")
        if self.park and self.park_bytes < 1:
            raise ConfigError(f"park-bytes {self.park_bytes} holds no KV")
