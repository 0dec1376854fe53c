"""All scenarios, by name, in the order in which they are listed."""

from __future__ import annotations

from superfluid_core.errors import ConfigError
from superfluid_core.simulator.scenario import Scenario
from superfluid_core.simulator.scenarios import batching, capacity, memory, prefill, queues, serving

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for module in (capacity, batching, prefill, queues, memory, serving)
    for scenario in module.SCENARIOS
}


def find_scenario(name: str) -> Scenario:
    """Look a scenario up. Raises ConfigError with the known names."""
    found = SCENARIOS.get(name)
    if found is None:
        raise ConfigError(f"unknown scenario {name[:40]!r}; known: {', '.join(SCENARIOS)}")
    return found
