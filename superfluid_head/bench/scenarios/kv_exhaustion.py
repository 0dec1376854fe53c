"""`kv-exhaustion`: more prompt and output than the KV pool holds, four times over, all at once.

Every request must end whole or with the server's own refusal, and a fresh one must be served afterwards. How long the burst took is
for holding against another server on the same machine, run with `--base-url` in turns with ours.
"""

from __future__ import annotations

from contextlib import ExitStack

from superfluid_head.bench.load import chat_body
from superfluid_head.bench.prose import prose
from superfluid_head.bench.scenarios.agents_and_chat import TOKENS_PER_WORD
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import ask, found, is_typed, own_box

WINDOW = 4_096
LANES = 8
BLOCK = 16


class KvExhaustion(Scenario):
    """The scenario."""

    name = "kv-exhaustion"
    about = "32 requests of ~3,000 and 900 tokens at a pool of 8 x 4,096"
    bars = (
        Bar("neither_whole_nor_typed", most=0, of_every=True),
        Bar("fresh_failed", most=0, of_every=True),
        Bar("whole", least=1, of_every=True),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.streams = plan.streams or self.size(32, 16)
        self.shrunk = self.size(1, 8)
        self.words = int(3_000 / self.shrunk / TOKENS_PER_WORD)
        self.tokens = 900 // self.shrunk

    def setup(self, stack: ExitStack) -> None:
        if self.plan.base_url:
            self.stage = found(self.plan)
            return
        window = WINDOW // self.shrunk
        flags = ("--max-batch", str(LANES), "--max-context", str(window))
        blocks = ("--kv-blocks", str(LANES * window // BLOCK))
        self.stage = own_box(stack, self.plan, self.engine_in_use, *flags, *blocks)

    def round(self, number: int) -> Figures:
        first = 10_000 * number + self.plan.seed
        bodies = [
            chat_body(self.stage.model, prose(first + n, self.words), self.tokens, ignore_eos=True)
            for n in range(self.streams)
        ]
        answers = ask(self.stage, bodies)
        fresh = ask(self.stage, [chat_body(self.stage.model, prose(first + 999, 40), 16)])
        begun_ms = min(each.started_ms for each in answers)
        ended_ms = max(each.ended_ms for each in answers)
        return {
            "whole": sum(each.is_complete for each in answers),
            "refused": sum(is_typed(each) and not each.is_complete for each in answers),
            "neither_whole_nor_typed": sum(not is_typed(each) for each in answers),
            "fresh_failed": sum(not each.is_complete for each in fresh),
            "burst_s": (ended_ms - begun_ms) / 1000,
        }


SCENARIO = KvExhaustion
