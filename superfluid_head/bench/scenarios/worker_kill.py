"""`worker-kill`: one long answer, and the node process killed in the middle of it.

On one box there is nowhere to go until the head has started its node again: the caller may get a typed error or the whole
answer, but never a wrong text, and the box must serve again unaided. With a second node the answer must come whole.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack

from superfluid_head.bench.kill_one import run_of
from superfluid_head.bench.load import Answer, chat, chat_body
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import prose
from superfluid_head.bench.rig import Child, RigError
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import (
    Stage,
    client_of,
    engine_flags,
    is_typed,
    own_box,
    own_fleet,
)
from superfluid_head.bench.small_fleet import Shape

BACK_S = 120.0


def child_of(head: Child) -> int:
    """Find the process of the head's own node, where the system tells. Raises RigError."""
    path = f"/proc/{head.pid}/task/{head.pid}/children"
    if not os.path.exists(path):
        raise RigError("this system does not tell the children of a process")
    with open(path, encoding="ascii") as file:
        for pid in map(int, file.read().split()):
            with open(f"/proc/{pid}/cmdline", "rb") as line:
                if b"noded" in line.read():
                    return pid
    raise RigError("the head has no node")


class WorkerKill(Scenario):
    """The scenario."""

    name = "worker-kill"
    about = "SIGKILL of the node process in a 400-token answer"
    needs_rig = "it kills processes"
    bars = (
        Bar("box_typed_or_whole", least=1, of_every=True),
        Bar("box_is_prefix", least=1, of_every=True),
        Bar("box_serves_again", least=1, of_every=True),
        Bar("fleet_whole", least=1, of_every=True),
        Bar("fleet_equal", least=1, of_every=True),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.tokens = self.size(400, 80)
        self.at_chunk = self.size(60, 20)

    def setup(self, stack: ExitStack) -> None:
        lanes = ("--max-batch", "4", "--max-context", "4096")
        self.box = own_box(stack, self.plan, self.engine_in_use, *lanes)
        flags = engine_flags(self.plan, self.engine_in_use, 2, *lanes)
        shape = Shape(("--http-allow-batch-invariant",))
        self.pair = own_fleet(stack, self.plan, flags, 2, shape)

    def round(self, number: int) -> Figures:
        return {**run(self._on_one_box(number)), **self._on_two(number)}

    def _body(self, stage: Stage, number: int) -> dict[str, object]:
        text = "Tell a story. " + prose(number, 30)
        return chat_body(stage.model, text, self.tokens, ignore_eos=True)

    async def _on_one_box(self, number: int) -> Figures:
        stage, head, rig = self.box, self.box.head, self.box.rig
        assert head is not None
        assert rig is not None
        body = self._body(stage, number)
        killed: list[float] = []

        def on_chunk(answer: Answer) -> None:
            if not killed and len(answer.at_ms) >= self.at_chunk:
                os.kill(child_of(head), signal.SIGKILL)
                killed.append(rig.now_ms())

        async with client_of(stage, is_invariant=True) as client:
            unbroken = await chat(client, stage.url, body, stage.clock)
            broken = await chat(client, stage.url, body, stage.clock, on_chunk)
            again = await chat(client, stage.url, body, stage.clock)
            while not again.is_complete and rig.now_ms() - killed[0] < BACK_S * 1000:
                await asyncio.sleep(0.2)
                again = await chat(client, stage.url, body, stage.clock)
        return {
            "box_whole": broken.is_complete,
            "box_typed_or_whole": is_typed(broken),
            "box_is_prefix": bool(broken.text) and unbroken.text.startswith(broken.text),
            "box_serves_again": again.is_complete,
            "box_back_ms": (again.at_ms[0] - killed[0]) if again.at_ms else float("nan"),
        }

    def _on_two(self, number: int) -> Figures:
        fleet = self.pair.fleet
        assert fleet is not None
        headers = {"x_superfluid_batch_invariant": "true"}
        run = run_of(fleet, number, self._body(self.pair, number), self.at_chunk, **headers)
        fleet.restart(run.node)
        return {
            "fleet_whole": run.is_complete,
            "fleet_equal": run.differs_at is None and run.is_usage_equal,
            "fleet_gap_ms": run.gap_ms,
        }


SCENARIO = WorkerKill
