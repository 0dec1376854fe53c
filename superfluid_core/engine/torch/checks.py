"""What a plan must not ask of this engine, checked before anything is touched.

Owns two judgements. `plan_flaw`: the plan as a whole does not fit the pool, so nothing of it may run (REFUSED). `start_fault`
and `input_fault`: one session cannot run here, and only its lane ends. A flaw is a bug of whoever planned; it must neither corrupt another
lane's blocks nor read outside a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from superfluid_core.errors import ErrorCode
from superfluid_core.scheduler.plan import LaneFault, LanePlan, LaneStart, TickPlan


@dataclass(frozen=True, slots=True)
class EngineBounds:
    """What a plan may name."""

    lanes: int
    blocks: int
    block_tokens: int
    window: int
    vocabulary: int
    batch_invariant: bool = False


def _outside(values: Sequence[int], below: int) -> bool:
    return bool(values) and (min(values) < 0 or max(values) >= below)


def _lane_flaw(lane: LanePlan, bounds: EngineBounds) -> str | None:
    if not lane.inputs or lane.computed < 0 or lane.grant < 0:
        return f"lane {lane.lane} has no inputs or counts below zero"
    if lane.decoding and len(lane.inputs) != 1:
        return f"lane {lane.lane} decodes with {len(lane.inputs)} inputs"
    end = lane.computed + len(lane.inputs) + max(0, lane.grant - 1)
    if end > len(lane.blocks) * bounds.block_tokens:
        return f"lane {lane.lane} writes {end} positions into {len(lane.blocks)} blocks"
    if end > bounds.window:
        return f"lane {lane.lane} writes {end} positions, the window is {bounds.window}"
    return None


def _block_flaw(plan: TickPlan, bounds: EngineBounds) -> str | None:
    named: Iterable[Sequence[int]] = chain(
        (lane.blocks for lane in plan.lanes),
        ((copy.source, copy.target) for copy in plan.copies),
        (park.blocks for park in plan.park_out),
        (park.blocks for park in plan.park_in),
    )
    if any(_outside(blocks, bounds.blocks) for blocks in named):
        return f"a block outside the pool of {bounds.blocks}"
    return None


def _park_flaw(plan: TickPlan, parked: dict[int, int]) -> str | None:
    known = parked | {park.ticket: len(park.blocks) for park in plan.park_out}
    for park in plan.park_in:
        if len(park.blocks) > known.pop(park.ticket, 0):
            return f"ticket {park.ticket} does not hold {len(park.blocks)} blocks"
    return None


def _lanes_flaw(plan: TickPlan, bounds: EngineBounds, held: Iterable[int]) -> str | None:
    """`held` are the lanes that already have a session."""
    lanes = [lane.lane for lane in plan.lanes]
    started = [start.lane for start in plan.starts]
    if _outside(lanes, bounds.lanes) or _outside(started, bounds.lanes):
        return f"a lane outside {bounds.lanes}"
    if len(set(lanes)) != len(lanes) or len(set(started)) != len(started):
        return "a lane twice"
    sitting = (set(held) - set(plan.frees)) | set(started)
    empty = [lane for lane in lanes if lane not in sitting]
    return f"lane {empty[0]} holds no session" if empty else None


def plan_flaw(
    plan: TickPlan, bounds: EngineBounds, held: Iterable[int], parked: dict[int, int]
) -> str | None:
    """Why nothing of this plan may run; None when it may. `parked` maps tickets to their block counts."""
    if plan.batch_invariant and not bounds.batch_invariant:
        return "batch invariance is not offered"
    flaw = _lanes_flaw(plan, bounds, held) or _block_flaw(plan, bounds) or _park_flaw(plan, parked)
    if flaw is not None:
        return flaw
    return next((found for lane in plan.lanes if (found := _lane_flaw(lane, bounds))), None)


def start_fault(start: LaneStart, bounds: EngineBounds) -> LaneFault | None:
    """Why a session cannot take its lane."""
    spec = start.spec
    if _outside(spec.prompt, bounds.vocabulary) or _outside(start.outputs, bounds.vocabulary):
        return LaneFault(
            start.lane, ErrorCode.INVALID_REQUEST, "a token id is outside the vocabulary"
        )
    return None


def input_fault(lane: LanePlan, bounds: EngineBounds) -> LaneFault | None:
    """Why a lane's inputs cannot be fed."""
    if _outside(lane.inputs, bounds.vocabulary):
        return LaneFault(
            lane.lane, ErrorCode.INVALID_REQUEST, "a token id is outside the vocabulary"
        )
    return None
