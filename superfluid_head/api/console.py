"""The fleet as a person watches it: its snapshot with the rates that readers see, and what runs and waits, for admins.

Owns how the dashboard's and `superfluid top`'s figures are put together and their bounds, and nothing of how they come about.
Whole state, not differences: a reader that missed one has missed nothing. Of several workers on a port each tells its share, from which
whoever was asked makes the whole (`JOIN`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from superfluid_core.session import QosClass
from superfluid_head.access.keys import Principal
from superfluid_head.api.state import Head
from superfluid_head.vitals import QUANTILE_SLOTS, SLOT_S, SLOTS_MAX

SESSIONS_SHOWN_MAX = 200
POINTS_AGAIN = 2
"""A state that follows another tells the slot that grows and the one before it."""
IS_SHARE = "superfluid.is_share"
"""Where the state of a request says that another worker asks, which adds up the answers."""
JOIN = "superfluid.join"
"""Where it has the way to make one state of this worker's share and those of the others."""
WITH_ALL_SLOTS = "slots=all"
"""The query of a worker that wants every slot, not those of the last minute alone."""
FOLLOW = "superfluid.follow"
"""Where it has the `Others`, whose events are told with its own."""
Join = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Hear = Callable[[int, str, dict[str, Any] | None], None]
"""Takes a worker's number, how far its events have come, and the event; None where there is none to tell."""


@dataclass(frozen=True, slots=True)
class Others:
    """The other workers, as worker `number` of `count` sees them.

    `follow` hears their events until it is cancelled, those of each after the id that it is given for it, or from now on.
    """

    number: int
    count: int
    follow: Callable[[Mapping[int, str], Hear], Coroutine[Any, Any, None]]


def fleet_state(head: Head) -> dict[str, Any]:
    """Return how the fleet stands: its snapshot, each node's tokens a second through this head, and the vitals."""
    now_ns, vitals = head.clock.now_ns(), head.metrics.vitals
    rates = vitals.rates(now_ns)
    found = head.fleet.snapshot()
    nodes = [{**node, "tokens_per_s": rates.get(node["name"], 0.0)} for node in found["nodes"]]
    return {
        "object": "fleet",
        **found,
        "nodes": nodes,
        "classes": [qos.label for qos in QosClass],
        "vitals": vitals.summary(now_ns),
        "head": {
            "started": head.created_s,
            "now": head.clock.wall_s(),
            "version": head.version,
            "is_draining": head.inflight.is_draining,
            "warnings": list(head.warnings),
        },
    }


def watched_state(head: Head, principal: Principal, *, is_first: bool) -> dict[str, Any]:
    """Return `fleet_state` with the sessions and the points of the charts; all that are kept the first time."""
    sessions = head.sessions.visible(principal)
    points = SLOTS_MAX if is_first else POINTS_AGAIN
    return {
        **fleet_state(head),
        "sessions": [each.shown() for each in sessions[:SESSIONS_SHOWN_MAX]],
        "sessions_total": len(sessions),
        "slot_s": SLOT_S,
        "points": head.metrics.vitals.points(head.clock.now_ns(), head.clock.wall_s(), points),
    }


async def whole_state(head: Head, own: dict[str, Any], join: Join | None, points: int = 0) -> Any:
    """Return `own` made one with the states of the other workers, if there are any; with so many `points` of the charts."""
    if join is None:
        return own
    return await join({**own, "share": _share(head, points)})


def share_state(head: Head, principal: Principal, slots: int) -> dict[str, Any]:
    """Return what another worker needs of this one."""
    return {**watched_state(head, principal, is_first=False), "share": _share(head, slots)}


def _share(head: Head, points: int) -> dict[str, Any]:
    """Tell the slots in a form that adds up: those that are shown, and those that the quantiles are of."""
    now_ns = head.clock.now_ns()
    return {
        "now_ns": now_ns,
        "wall_s": head.clock.wall_s(),
        "points": points,
        "slots": head.metrics.vitals.shares(now_ns, max(points, QUANTILE_SLOTS)),
    }
