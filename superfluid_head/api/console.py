"""The fleet as a person watches it: its snapshot with the rates that readers see, and what runs and waits, for admins.

Owns how the dashboard's and `superfluid top`'s figures are put together and their bounds, and nothing of how they come about.
Whole state, not differences: a reader that missed one has missed nothing.
"""

from __future__ import annotations

from typing import Any

from superfluid_core.session import QosClass
from superfluid_head.access.keys import Principal
from superfluid_head.api.state import Head
from superfluid_head.vitals import SLOT_S, SLOTS_MAX

SESSIONS_SHOWN_MAX = 200
POINTS_AGAIN = 2
"""A state that follows another tells the slot that grows and the one before it."""


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
    return {
        **fleet_state(head),
        "sessions": [each.shown() for each in sessions[:SESSIONS_SHOWN_MAX]],
        "sessions_total": len(sessions),
        "slot_s": SLOT_S,
        "points": head.metrics.vitals.points(
            head.clock.now_ns(), head.clock.wall_s(), SLOTS_MAX if is_first else POINTS_AGAIN
        ),
    }
