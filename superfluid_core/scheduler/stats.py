"""What the scheduler tells about itself: counters that only grow, and a snapshot of them with the state of the moment.

Exporters turn a snapshot into metrics, STATUS and JSON. No locks, no copies of queues, nothing that grows with load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from superfluid_core.errors import ErrorCode
from superfluid_core.session import FinishReason, QosClass, SessionKey

TENANTS_MAX = 256
OTHER_TENANTS = "(other)"


@dataclass(slots=True)
class Counters:
    """Totals since the start. Only the scheduler writes them."""

    accepted: int = 0
    rejected: int = 0
    preempted_for_class: int = 0
    preempted_for_blocks: int = 0
    preempted_for_pressure: int = 0
    swapped_for_class: int = 0
    swapped_for_blocks: int = 0
    swapped_for_pressure: int = 0
    restored_tokens: int = 0
    imported_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_miss_tokens: int = 0
    ticks: int = 0
    steps: int = 0
    interrupts: int = 0
    refused_plans: int = 0
    held_blocks: int = 0
    held_reservation: int = 0
    held_class: int = 0
    held_step: int = 0
    held_tenant: int = 0
    held_thrash: int = 0
    held_pressure: int = 0
    evicted_for_pressure: int = 0
    prefill_budget_tokens: int = 0
    decode_grant_tokens: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
    refused: dict[ErrorCode, int] = field(default_factory=dict)


class SchedulerLoad(NamedTuple):
    """What STATUS says, many times a second: the part of a snapshot that placement looks at."""

    lanes_busy: int
    lanes: int
    queued: tuple[int, int, int, int]
    queued_tokens: int
    blocks_used: int
    blocks_cached: int
    blocks: int
    prefill_rate: float
    decode_rates: tuple[tuple[int, float], ...]
    step_predicted_ns: int


class TenantTokens(NamedTuple):
    """What was computed for a tenant since the start."""

    tenant: str
    prompt: int
    output: int


class TenantMeters:
    """Two counters per tenant, [prompt, output]; tenants beyond `TENANTS_MAX` share one pair."""

    def __init__(self) -> None:
        self._meters: dict[str, list[int]] = {}

    def of(self, tenant: str) -> list[int]:
        meter = self._meters.get(tenant)
        if meter is None:
            name = tenant if len(self._meters) < TENANTS_MAX else OTHER_TENANTS
            meter = self._meters.setdefault(name, [0, 0])
        return meter

    def read(self) -> list[TenantTokens]:
        return [TenantTokens(name, *meter) for name, meter in self._meters.items()]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """One moment. `queued` counts sessions per class, best first; rates are 0 while unknown.

    `swapped_*` are those of `preempted_*` whose KV went to the host. `recompute_ratio` is gate G6's, over its window; `thrash_trips`
    counts how often the gate closed, `thrash_lanes` is how many lanes it allows now. `refused` counts by code (G1, G2, G5).
    """

    lanes_busy: int
    lanes: int
    lanes_prefilling: int
    lanes_decoding: int
    queued: tuple[int, int, int, int]
    queued_tokens: int
    blocks_used: int
    blocks_cached: int
    blocks: int
    reserved_blocks: int
    kv_reserved_tokens: int
    prefill_rate: float
    decode_rates: tuple[tuple[int, float], ...]
    step_predicted_ns: int
    draining: bool
    accepted: int
    rejected: int
    preemptions: int
    preempted_for_class: int
    preempted_for_blocks: int
    preempted_for_pressure: int
    swapped_for_class: int
    swapped_for_blocks: int
    swapped_for_pressure: int
    restored_tokens: int
    imported_tokens: int
    park_bytes: int
    park_bytes_max: int
    parked_sessions: int
    parked_prefixes: int
    park_refused: int
    park_dropped: int
    recompute_ratio: float
    thrash_trips: int
    thrash_lanes: int
    prompt_tokens: int
    output_tokens: int
    recomputed_tokens: int
    prefix_hit_tokens: int
    prefix_miss_tokens: int
    prefix_evicted_blocks: int
    evicted_for_pressure: int
    ticks: int
    steps: int
    interrupts: int
    refused_plans: int
    held_blocks: int
    held_reservation: int
    held_class: int
    held_step: int
    held_tenant: int
    held_thrash: int
    held_pressure: int
    prefill_budget_tokens: int
    decode_grant_tokens: int
    finished: tuple[tuple[FinishReason, int], ...]
    refused: tuple[tuple[ErrorCode, int], ...]


@dataclass(frozen=True, slots=True)
class SessionView:
    """One live session, for SESSIONS and for a person. Lengths only, no content."""

    key: SessionKey
    state: str
    qos: QosClass
    tenant: str
    prompt: int
    output: int
