"""`tool-session`: one tool and two hundred turns of call and answer, the whole conversation so far sent each time.

With the simulated engine the calls are dictated, in the Hermes way of writing them; what is measured is that the server parses every one
and takes it back as history. Against a server with a real model the model has to want to call, so the tool is required. Older turns than fit
into half the window are left out, as agents do.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from superfluid_head.bench.load import Answer, chat, chat_body
from superfluid_head.bench.loops import run
from superfluid_head.bench.rig import Rig
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import (
    Stage,
    client_of,
    engine_flags,
    found,
)
from superfluid_head.bench.small_fleet import Shape, SmallFleet

TURNS_KEPT = 60
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "harbour"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Says what can be seen at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 24}},
            "required": ["place"],
        },
    },
}


class ToolSession(Scenario):
    """The scenario."""

    name = "tool-session"
    about = "one tool, 200 turns of call and answer"
    engine = "mock"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.turns = self.size(200, 20)
        self.bars = (
            Bar("calls", least=self.turns, of_every=True),
            Bar("as_text", most=0, of_every=True),
            Bar("failed", most=0, of_every=True),
        )

    def setup(self, stack: ExitStack) -> None:
        if self.plan.base_url:
            self.stage = found(self.plan)
            return
        rig = stack.enter_context(Rig())
        script = rig.folder / "script.jsonl"
        script.write_text(json.dumps({"pieces": [CALL, {"eos": True}]}) + "\n", encoding="ascii")
        flags = engine_flags(self.plan, self.engine_in_use, 1)
        if self.is_mock:
            flags = (*flags, "--mock-script", str(script))
        fleet = SmallFleet(rig, flags, self.plan.model, 1, Shape(("--tool-call-parser", "hermes")))
        self.stage = Stage(fleet.url, fleet.served, rig=rig, fleet=fleet, head=fleet.head)

    def round(self, number: int) -> Figures:
        return run(self._round(number))

    async def _round(self, number: int) -> Figures:
        asked: list[dict[str, Any]] = [{"role": "user", "content": f"Look around, part {number}."}]
        turns: list[dict[str, Any]] = []
        calls = as_text = failed = 0
        firsts: list[float] = []
        async with client_of(self.stage) as client:
            for turn in range(self.turns):
                messages = [*asked, *turns[-2 * TURNS_KEPT :]]
                answer = await chat(client, self.stage.url, self._body(messages), self.stage.clock)
                made = self._made(answer)
                failed += not answer.is_complete
                calls += made is not None
                as_text += bool(answer.text.strip())
                firsts.append(answer.first_ms or 0.0)
                if made is not None:
                    turns += self._history(turn, *made)
        return {
            "calls": calls,
            "as_text": as_text,
            "failed": failed,
            "first_turn_ttft_ms": firsts[0],
            "last_turn_ttft_ms": firsts[-1],
        }

    def _body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        choice = "auto" if self.is_mock and not self.plan.base_url else "required"
        return chat_body(
            self.stage.model, "", 256, messages=messages, tools=[TOOL], tool_choice=choice
        )

    @staticmethod
    def _made(answer: Answer) -> tuple[str, str] | None:
        """Read the one call of an answer that ended with it; None when it is not one."""
        said = answer.choices.get(0)
        if said is None or said.finish_reason != "tool_calls" or len(said.calls) != 1:
            return None
        ((name, arguments),) = said.calls.values()
        try:
            is_call = name == "look" and isinstance(json.loads(arguments), dict)
        except ValueError:
            return None
        return (name, arguments) if is_call else None

    @staticmethod
    def _history(turn: int, name: str, arguments: str) -> list[dict[str, Any]]:
        call = {"id": f"call_{turn}", "type": "function"}
        function = {"name": name, "arguments": arguments}
        return [
            {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": f"ship {turn}"},
        ]


SCENARIO = ToolSession
