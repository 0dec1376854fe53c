"""One tenant's view of a registry: the samples that carry its name, and nothing else of anybody."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class OwnRows(Collector):
    """The samples of one tenant."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        self._registry = registry
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            own = [each for each in family.samples if each.labels.get("tenant") == self._tenant]
            if own:
                shown = Metric(family.name, family.documentation, family.type, family.unit)
                shown.samples = own
                yield shown
