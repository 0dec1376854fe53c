"""What several heads say, as one: metrics and states summed. Pure.

Counters and histograms are sums, but for what the parent counts for all. A gauge is a sum where it counts what each head has of its own, and else, where all heads see
the same thing (a node), the largest that any of them sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from superfluid_head.api.console import SESSIONS_SHOWN_MAX
from superfluid_head.vitals import Vitals

WORKERS = "superfluid_head_workers"
OWN_GAUGES = frozenset(
    {
        "superfluid_head_requests_in_flight",
        "superfluid_head_queue_depth",
        "superfluid_head_node_sessions",
        "superfluid_head_node_links",
        WORKERS,
    }
)
"""Gauges of what a head alone has, be it that it is there."""
NODE_SUMS = ("tokens_per_s", "faults", "sessions", "links", "rekeys", "dial_failures")
"""What of a node each head has or has counted for itself."""
SHARED_COUNTERS = frozenset({"superfluid_head_worker_ends_total"})
"""Counters that every head reads from the same place."""


def metrics(pages: Sequence[str]) -> str:
    """Merge pages of the Prometheus text format. The order is that of the first page."""
    kinds: dict[str, str] = {}
    said: dict[str, list[str]] = {}
    values: dict[str, dict[str, float]] = {}
    for page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                _, word, family, text = (*line.split(" ", 3), "")[:4]
                lines = said.setdefault(family, [])
                if line not in lines:
                    lines.append(line)
                if word == "TYPE":
                    kinds[family] = text
            elif line:
                name, _, value = line.rpartition(" ")
                _add(
                    values.setdefault(family, {}), name, float(value), is_sum=_is_sum(family, kinds)
                )
    out: list[str] = []
    for family, rows in said.items():
        out += rows
        out += [f"{name} {value!r}" for name, value in values.get(family, {}).items()]
    return "\n".join(out) + "\n"


def _is_sum(family: str, kinds: dict[str, str]) -> bool:
    if kinds.get(family) == "gauge":
        return family in OWN_GAUGES
    return family not in SHARED_COUNTERS


def _add(rows: dict[str, float], name: str, value: float, *, is_sum: bool) -> None:
    before = rows.get(name)
    if before is None:
        rows[name] = value
    else:
        rows[name] = before + value if is_sum else max(before, value)


def fleets(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how the fleet stands by this head's word, with what heads have of their own summed and told apart.

    Quantiles and rates are those of all that was measured, by the shares that were told; what has sessions has those of all.
    """
    every = [own, *others]
    shown = {**own, **_vitals(own, others), **_sessions(own, others)}
    shown.pop("share", None)
    shown["running"] = sum(each.get("running", 0) for each in every)
    shown["waiting"] = _columns(each.get("waiting", []) for each in every)
    shown["counters"] = _sums(each.get("counters", {}) for each in every)
    told = [_named(each.get("nodes", ())) for each in others]
    shown["nodes"] = [_node(node, told) for node in own.get("nodes", ())]
    shown["workers"] = [
        {
            "running": each.get("running", 0),
            "waiting": each.get("waiting", []),
            **each.get("head", {}),
        }
        for each in every
    ]
    return shown


def _vitals(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    share = own.get("share")
    if share is None:
        return {}
    every = [share, *(each["share"] for each in others if "share" in each)]
    joined = Vitals.joined(slot for each in every for slot in each["slots"])
    now_ns, count = share["now_ns"], share["points"]
    found: dict[str, Any] = {"vitals": joined.summary(now_ns)}
    if count:
        found["points"] = joined.points(now_ns, share["wall_s"], count)
    return found


def _sessions(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if "sessions" not in own:
        return {}
    every = [own, *others]
    listed = [session for each in every for session in each.get("sessions", ())]
    total = sum(each.get("sessions_total", 0) for each in every)
    return {"sessions": listed[:SESSIONS_SHOWN_MAX], "sessions_total": total}


def _node(own: dict[str, Any], others: Iterable[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    same = [other[own["name"]] for other in others if own.get("name") in other]
    summed: dict[str, Any] = {
        name: sum(each.get(name, 0) for each in (own, *same)) for name in NODE_SUMS if name in own
    }
    return {**own, **summed}


def _named(nodes: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in nodes if "name" in node}


def _columns(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=False)]


def _sums(every: Iterable[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in every:
        for name, value in each.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[name] = found.get(name, 0) + value
    return found


def schedulers(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the nodes measure, which is the same for all heads, with what waits in every head."""
    waiting = _sums(each.get("head", {}).get("waiting", {}) for each in (own, *others))
    return {**own, "head": {**own.get("head", {}), "waiting": waiting}}


def lists(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join lists."""
    return {**own, "data": [item for each in (own, *others) for item in each.get("data", ())]}
