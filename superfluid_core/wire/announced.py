"""What a node announces among its features beside the names of abilities: rules of its scheduler that heads place by.

Owns how such a rule is written. A head that does not know one ignores it, so nothing here needs a new minor; a node's own queue
keeps the rule in any case, and what heads gain is to leave room for others.
"""

from __future__ import annotations

from collections.abc import Iterable

TENANT_LANES = "tenant-lanes-"
_DIGITS_MAX = 4


def tenant_lanes_feature(lanes: int) -> str:
    """Announce that one tenant has at most so many lanes of an engine."""
    return f"{TENANT_LANES}{lanes}"


def tenant_lanes_of(features: Iterable[str]) -> int:
    """Return the most lanes of one tenant; 0 when the node announces no cap."""
    for feature in features:
        digits = feature.removeprefix(TENANT_LANES)
        if digits != feature and digits.isdecimal() and len(digits) <= _DIGITS_MAX:
            return int(digits)
    return 0
