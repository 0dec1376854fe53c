"""A model at work: its scheduler and the loop that runs its engine; and what several of them are together.

A node has one, or two with a fill-in-the-middle model. Inputs find their scheduler here: a new session by the name of its
model, everything else goes to all, for keys are unique in the process and unknown ones are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superfluid_core.clock import MS
from superfluid_core.engine.loop import EngineLoop
from superfluid_core.scheduler.plan import Input, Submit
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_core.scheduler.stats import SchedulerLoad, SessionView
from superfluid_core.wire.messages import EngineLoad, Status
from superfluid_noded.answers import ModelCard


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """One model at work."""

    card: ModelCard
    scheduler: Scheduler
    loop: EngineLoop

    def takes(self, item: Input) -> bool:
        return not isinstance(item, Submit) or item.spec.model in self.card.names


def submit(servings: Sequence[Serving], inputs: Sequence[Input]) -> None:
    """Give every scheduler what concerns it."""
    for serving in servings:
        mine = [item for item in inputs if serving.takes(item)]
        if mine:
            serving.loop.submit(*mine)


def sessions(servings: Sequence[Serving]) -> list[SessionView]:
    """Every live session of every model."""
    return [view for serving in servings for view in serving.scheduler.sessions()]


def steps(servings: Sequence[Serving]) -> int:
    """Forward passes of all engines together."""
    return sum(serving.loop.steps for serving in servings)


def status_of(servings: Sequence[Serving], stamp_ns: int, *, draining: bool) -> Status:
    """Describe load and liveness. Sessions are counted over all models; pool and rates are the main one's.

    Where there are several models, the load of each follows, in the order of their engines' numbers.
    """
    every = [serving.scheduler.load() for serving in servings]
    if len(every) == 1:
        return _status_of_one(every[0], servings[0].loop.steps, stamp_ns, is_draining=draining)
    main = every[0]
    queued = _queued(every)
    return Status(
        stamp_ns=stamp_ns,
        steps=steps(servings),
        lanes_busy=sum(stats.lanes_busy for stats in every),
        lanes=sum(stats.lanes for stats in every),
        queued=queued,
        queued_tokens=sum(stats.queued_tokens for stats in every),
        blocks_used=main.blocks_used,
        blocks_cached=main.blocks_cached,
        blocks=main.blocks,
        prefill_rate=main.prefill_rate,
        decode_rates=main.decode_rates,
        step_predicted_ms=max(-(-stats.step_predicted_ns // MS) for stats in every),
        draining=draining,
        engines=tuple(map(_load_of, every)),
    )


def _status_of_one(
    load: SchedulerLoad, steps_made: int, stamp_ns: int, *, is_draining: bool
) -> Status:
    """Describe the only model's load: several times a second and head, on the loop that tokens pass."""
    return Status(
        stamp_ns,
        steps_made,
        load.lanes_busy,
        load.lanes,
        load.queued,
        load.queued_tokens,
        load.blocks_used,
        load.blocks_cached,
        load.blocks,
        load.prefill_rate,
        load.decode_rates,
        -(-load.step_predicted_ns // MS),
        is_draining,
    )


def _load_of(stats: SchedulerLoad) -> EngineLoad:
    return EngineLoad(
        lanes_busy=stats.lanes_busy,
        lanes=stats.lanes,
        queued=sum(stats.queued),
        queued_tokens=stats.queued_tokens,
        blocks_used=stats.blocks_used,
        blocks_cached=stats.blocks_cached,
        blocks=stats.blocks,
        prefill_rate=stats.prefill_rate,
        decode_rates=stats.decode_rates,
    )


def _queued(every: Sequence[SchedulerLoad]) -> tuple[int, int, int, int]:
    first, second, third, fourth = (
        sum(counts) for counts in zip(*(s.queued for s in every), strict=True)
    )
    return first, second, third, fourth
