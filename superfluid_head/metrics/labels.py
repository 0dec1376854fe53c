"""Label values that cannot grow without end: the first so many of a kind keep their names, all later ones share one.

Whatever a client, a key file, a node or a head's own route table brings may become a label value only through here. Pure.
"""

from __future__ import annotations

LABEL_VALUES_MAX = 128
"""Routes, models, nodes: so many of each keep their names."""
TENANTS_MAX = 2_048
OTHER = "other"
OTHERS = "~other"
"""The rest of the tenants. No tenant can be called this, so nobody is shown the rest's rows as their own."""


class Bounded:
    """The values of one label. `rest` is what everything beyond the first `values_max` is called."""

    def __init__(self, values_max: int = LABEL_VALUES_MAX, rest: str = OTHER) -> None:
        self._values_max = values_max
        self._rest = rest
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._values_max:
            return self._rest
        self._known.add(value)
        return value
