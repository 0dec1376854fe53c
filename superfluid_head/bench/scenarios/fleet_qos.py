"""`fleet-qos`: every lane of every node busy with agents, and one interactive chat through the head.

It is `agents-and-chat` over many nodes: the class crosses the wire, the head does not let the chat wait, a node preempts for it.
"""

from __future__ import annotations

from contextlib import ExitStack

from superfluid_head.bench.scenarios.agents_and_chat import AgentsAndChat
from superfluid_head.bench.scenarios.base import Plan
from superfluid_head.bench.scenarios.stage import engine_flags, found, own_fleet
from superfluid_head.bench.small_fleet import Shape

NODES = 4
LANES = 4
RATES = "prefill=8000,decode=40"


class FleetQos(AgentsAndChat):
    """The scenario."""

    name = "fleet-qos"
    about = "agents in every lane of every node, then an interactive chat"
    engine = "mock"
    lanes = NODES * (LANES + 2)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.tokens = self.size(384, 160)

    def setup(self, stack: ExitStack) -> None:
        if self.plan.base_url:
            self.stage = found(self.plan)
            return
        flags = engine_flags(
            self.plan, self.engine_in_use, NODES, "--max-batch", str(LANES), rates=RATES
        )
        self.stage = own_fleet(stack, self.plan, flags, NODES, Shape())


SCENARIO = FleetQos
