"""`reload`: long streams through a SIGHUP of the head, and then through the replacement of one node by another.

The list of nodes stands in a file; the head reads it again twice, the second time with a new node in the place of a drained one.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from superfluid_head.bench.load import Answer, chat_body
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import prose
from superfluid_head.bench.rig import Rig
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import (
    Stage,
    ask,
    ask_all,
    client_of,
    engine_flags,
    failures,
)
from superfluid_head.bench.small_fleet import Shape, SmallFleet

GRACE_MS = 300
STREAMS = 4


class FileFleet(SmallFleet):
    """A fleet whose head reads its nodes from a file."""

    @property
    def file(self) -> Path:
        return self.rig.folder / "nodes.toml"

    def link_addresses(self) -> list[str]:
        self.write_file()
        return [f"@{self.file}"]

    def write_file(self) -> None:
        quoted = ", ".join(f'"{name}={address}"' for name, address in self.addresses.items())
        self.file.write_text(f"nodes = [{quoted}]\n", encoding="ascii")

    def replace(self, name: str, by: str) -> None:
        """Start `by`, take `name` out of the list; the head has to be told."""
        child = self._start(by)
        self.rig.wait_ready(child)
        del self.addresses[name]
        self.addresses[by] = child.listen
        self.write_file()


class Reload(Scenario):
    """The scenario."""

    name = "reload"
    about = "4 streams of 500 tokens; SIGHUP, then a node drained and replaced"
    needs_rig = "it signals the head and replaces a node"
    bars = (
        Bar("failed", most=0, of_every=True),
        Bar("reached_the_end", least=1, of_every=True),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.tokens = self.size(500, 120)

    def setup(self, stack: ExitStack) -> None:
        rig = stack.enter_context(Rig())
        rates = "prefill=20000,decode=25"
        flags = engine_flags(self.plan, self.engine_in_use, 2, "--max-batch", "4", rates=rates)
        self.fleet = FileFleet(rig, flags, self.plan.model, 2, Shape())
        self.stage = Stage(self.fleet.url, self.fleet.served, rig=rig, fleet=self.fleet)
        self.bodies = self._bodies()
        self.unbroken = ask(self.stage, self.bodies)

    def _bodies(self) -> list[dict[str, Any]]:
        return [
            chat_body(self.stage.model, prose(n + 7, 30), self.tokens, ignore_eos=True)
            for n in range(STREAMS)
        ]

    def round(self, number: int) -> Figures:
        old, new = f"node-{number}", f"node-{number + 2}"
        answers = run(self._round(old, new))
        pairs = zip(answers, self.unbroken, strict=True)
        return {
            "failed": failures(answers),
            "reached_the_end": all(each.usage[1] == self.tokens for each in answers),
            "equal_share": sum(a.text == b.text for a, b in pairs) / len(answers),
            "longest_gap_ms": max(gap for each in answers for gap in each.gaps_ms()),
            "unbroken_gap_ms": max(gap for each in self.unbroken for gap in each.gaps_ms()),
        }

    async def _round(self, old: str, new: str) -> list[Answer]:
        usual_ms = max(each.ended_ms - each.started_ms for each in self.unbroken)
        async with client_of(self.stage) as client, asyncio.TaskGroup() as group:
            running = group.create_task(ask_all(client, self.stage, self.bodies))
            await asyncio.sleep(0.15 * usual_ms / 1e3)
            self.fleet.head.signal(signal.SIGHUP)
            await asyncio.sleep(0.1 * usual_ms / 1e3)
            url = f"{self.stage.url}/v1/fleet/nodes/{old}/drain"
            (await client.post(url, json={"grace_ms": GRACE_MS})).raise_for_status()
            await asyncio.to_thread(self.fleet.replace, old, new)
            self.fleet.head.signal(signal.SIGHUP)
            answers = await running
        self.fleet.node(old).signal(signal.SIGTERM)
        await asyncio.to_thread(self.fleet.wait_linked)
        return answers


SCENARIO = Reload
