"""Every scenario by name: a module each, imported when it is asked for.

Owns the list and nothing else. What a scenario is, `base.py` says; `run.py` runs it.
"""

from __future__ import annotations

import importlib

from superfluid_head.bench.scenarios.base import Scenario

ONE_BOX = (
    "worker-kill", "restart", "agents-and-chat", "kv-exhaustion", "reload", "tool-session",
    "disconnect", "shared-prefix",
)  # fmt: skip
FLEET = (
    "kill", "freeze", "burst", "prefix", "cancel", "rolling", "fair", "fleet-qos", "fifty", "overhead",
)  # fmt: skip
NAMES = (*ONE_BOX, *FLEET)


def scenario_named(name: str) -> type[Scenario]:
    """Import a scenario. Raises KeyError for a name that is none."""
    if name not in NAMES:
        raise KeyError(name)
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    kind: type[Scenario] = module.SCENARIO
    return kind
