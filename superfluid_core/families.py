"""Families of metrics that prometheus_client has no cheap or no fitting object for: they are read when somebody scrapes.

`Histograms` holds plain histograms by label values, and `Counts` plain numbers, so that observing costs no lock and no look-up; `Read` yields whatever a
function returns at that moment. Head and node name their metrics with these; nothing here names one, and whoever observes bounds
the label values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from superfluid_core.histogram import Histogram

Rows = Mapping[tuple[str, ...], float]


class Histograms(Collector):
    """One family of histograms. The caller bounds the label values."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._text = name, text
        self._labels, self._bounds = tuple(labels), tuple(bounds)
        self._made: dict[tuple[str, ...], Histogram] = {}

    def of(self, *values: str) -> Histogram:
        """Return the histogram of these label values; keep it where it is observed often."""
        found = self._made.get(values)
        if found is None:
            found = self._made[values] = Histogram(self._bounds)
        return found

    def describe(self) -> Iterable[Metric]:
        return (self._family(),)

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        for values, made in self._made.items():
            family.add_metric(values, made.cumulative(), made.total)
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._text, labels=self._labels)


class Counts(Collector):
    """One family of counters by label values, raised by one thread. The caller bounds the label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._rows: dict[tuple[str, ...], float] = {}

    def add(self, *values: str, count: float = 1) -> None:
        """Raise the counter of these label values; by 0 it is there from now on."""
        self._rows[values] = self._rows.get(values, 0) + count

    def describe(self) -> Iterable[Metric]:
        return (self._family(),)

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        for values, value in list(self._rows.items()):
            family.add_metric(values, value)
        yield family

    def _family(self) -> CounterMetricFamily:
        return CounterMetricFamily(self._name, self._text, labels=self._labels)


class Read(Collector):
    """One family of counters or gauges whose values are asked for at scrape time."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        read: Callable[[], Rows] = dict,
        is_counter: bool = False,
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._is_counter = is_counter
        self.read = read

    def describe(self) -> Iterable[Metric]:
        return (self._family(),)

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        for values, value in self.read().items():
            family.add_metric(values, value)
        yield family

    def _family(self) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self._is_counter else GaugeMetricFamily
        return kind(self._name, self._text, labels=self._labels)
