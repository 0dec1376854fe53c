"""`restart`: a long conversation on one box, everything killed in mid-answer, everything started again, the request sent again.

Nothing of a conversation lives on the server, so the answer after the restart must be the one of before.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import Any

from superfluid_head.bench.load import Answer, chat, chat_body
from superfluid_head.bench.loops import run
from superfluid_head.bench.prose import prose
from superfluid_head.bench.rig import Rig
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import Stage, client_of, served_name, start_box
from superfluid_head.bench.scenarios.worker_kill import child_of

AT_CHUNK = 20
WORDS_PER_TURN = 120


def conversation(seed: int, words: int) -> list[dict[str, str]]:
    """Make a conversation of about so many words, in turns."""
    turns = max(1, words // WORDS_PER_TURN) | 1
    roles = ("user", "assistant")
    return [
        {"role": roles[n % 2], "content": prose(seed + n, words // turns)} for n in range(turns)
    ]


class Restart(Scenario):
    """The scenario."""

    name = "restart"
    about = "SIGKILL of everything at the 20th piece, a new start, the same request"
    needs_rig = "it kills processes"
    bars = (Bar("is_identical", least=1, of_every=True),)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.words = self.size(3_600, 300)
        self.tokens = self.size(160, 40)

    def setup(self, stack: ExitStack) -> None:
        self.rig = stack.enter_context(Rig())

    def round(self, number: int) -> Figures:
        stage = self._start()
        messages = conversation(1000 * number + self.plan.seed, self.words)
        body = chat_body(stage.model, "", self.tokens, messages=messages, ignore_eos=True)
        unbroken, broken = run(self._both(stage, body))
        began_ms = self.rig.now_ms()
        stage = self._start()
        started_ms = self.rig.now_ms() - began_ms
        again = run(self._one(stage, body))
        self._kill(stage)
        return {
            "prompt_tokens": unbroken.prompt_tokens,
            "broken_at": len(broken.at_ms),
            "start_ms": started_ms,
            "is_identical": again.is_complete
            and (again.text, again.usage) == (unbroken.text, unbroken.usage),
        }

    def _start(self) -> Stage:
        flags = ("--max-batch", "4")
        head = start_box(self.rig, self.plan, self.engine_in_use, *flags)
        return Stage(head.url, served_name(head.url), rig=self.rig, head=head)

    @staticmethod
    def _kill(stage: Stage) -> None:
        assert stage.head is not None
        node = child_of(stage.head)
        stage.head.kill()
        os.kill(node, signal.SIGKILL)

    async def _one(self, stage: Stage, body: dict[str, Any]) -> Answer:
        async with client_of(stage) as client:
            return await chat(client, stage.url, body, stage.clock)

    async def _both(self, stage: Stage, body: dict[str, Any]) -> tuple[Answer, Answer]:
        is_killed: list[bool] = []

        def on_chunk(answer: Answer) -> None:
            if not is_killed and len(answer.at_ms) >= AT_CHUNK:
                is_killed.append(True)
                self._kill(stage)

        async with client_of(stage) as client:
            unbroken = await chat(client, stage.url, body, stage.clock)
            return unbroken, await chat(client, stage.url, body, stage.clock, on_chunk)


SCENARIO = Restart
