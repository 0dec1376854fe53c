"""Writes docs/metrics.md from the registries of a head and of a node: `python -m tests.observability.reference`.

Names, kinds, labels and texts are those that `/metrics` gives; nothing is written twice. A test holds the file against this.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_head.fleet.causes import CAUSES
from superfluid_head.metrics import LABEL_VALUES_MAX, TENANTS_MAX, HeadMetrics
from superfluid_head.metrics.nodes import NODES_MAX
from superfluid_noded.metrics import FACTS, NodeMetrics
from superfluid_noded.metrics import TENANTS_MAX as NODE_TENANTS_MAX

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

INTRO = f"""# Metrics

Made from the code by `python -m tests.observability.reference`; do not edit. Prometheus text format 0.0.4. A histogram `x` has
`x_bucket{{le}}`, `x_sum` and `x_count`. Times are seconds.

Labels cannot grow without end. A head keeps the names of the first {LABEL_VALUES_MAX} routes, models and nodes and counts the rest as
`other`; of the first {TENANTS_MAX:,} tenants, the rest as `~other`, which no tenant can be called; rows per node are shown for {NODES_MAX}
nodes. A node keeps {NODE_TENANTS_MAX} tenants. Classes, states, causes, parts and outcomes are fixed words. No label holds content, addresses of clients or ids of
requests.
"""

HEAD = f"""
## Of a head

`GET /metrics` on the address for clients; a key that is no admin's sees the rows that carry its name. Causes of moves and reasons of placements
are {", ".join(f"`{cause}`" for cause in CAUSES)}. With `--workers` the page is that of all heads on the port together.
"""

NODE = """
## Of a node

`GET /metrics` where `--metrics` says. With a second model (`--fim-model`) whatever is read from a scheduler has the label `model` too.
"""


class Row(NamedTuple):
    """One family."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def rows(registry: CollectorRegistry) -> Iterator[Row]:
    """Every family of a registry, in the order of names."""
    found = []
    for collector in list(registry._collector_to_names):
        own = tuple(getattr(collector, "_labelnames", ()))
        for family in collector.collect():
            labels = tuple(getattr(family, "_labelnames", own))
            name = family.name + ("_total" if family.type == "counter" else "")
            found.append(Row(name, family.type, labels, family.documentation))
    yield from sorted(found)


def head_registry() -> CollectorRegistry:
    return HeadMetrics().registry


def node_registry() -> CollectorRegistry:
    scheduler = Scheduler(SchedulerLimits(), PoolShape(16, 8, 128))
    return NodeMetrics(scheduler.stats, dict.fromkeys(FACTS, "x")).registry


def table(registry: CollectorRegistry) -> str:
    lines = ["", "| metric | kind | labels | |", "|---|---|---|---|"]
    lines += [
        f"| `{r.name}` | {r.kind} | {', '.join(r.labels)} | {r.text} |" for r in rows(registry)
    ]
    return "\n".join(lines) + "\n"


def page() -> str:
    return INTRO + HEAD + table(head_registry()) + NODE + table(node_registry())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
