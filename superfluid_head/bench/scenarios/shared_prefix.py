"""`shared-prefix`: many requests that share one long document, against as many with a document each.

How often the shared part was prefilled is told by the server's own count of cached tokens; a server that does not count them
misses the bar. The longer of two runs is the one without sharing; its time stands beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from superfluid_head.bench.load import Answer, chat_body
from superfluid_head.bench.prose import prose
from superfluid_head.bench.scenarios.agents_and_chat import TOKENS_PER_WORD
from superfluid_head.bench.scenarios.base import Bar, Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import ask, failures, found, own_box

DOCUMENT_TOKENS = 4_986
OUTPUT = 32
BLOCK = 16


def took_ms(answers: Sequence[Answer]) -> float:
    return max(each.ended_ms for each in answers) - min(each.started_ms for each in answers)


def prefills(answers: Sequence[Answer], own_tokens: int) -> float:
    """How many times the document was computed: what was not cached, less what each request has for itself."""
    sizes = [each.prompt_tokens for each in answers if each.is_complete]
    if not sizes:
        return float("nan")
    shared = max(1, min(sizes) - own_tokens)
    computed = [each.prompt_tokens - each.cached_tokens for each in answers if each.is_complete]
    return sum(max(0, each - own_tokens) for each in computed) / shared


class SharedPrefix(Scenario):
    """The scenario."""

    name = "shared-prefix"
    about = "32 requests share one document, against 32 distinct documents"
    bars = (
        Bar("failed", most=0, of_every=True),
        Bar("prefills_of_the_document", most=1.0),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.streams = plan.streams or self.size(32, 8)
        self.words = int(self.size(DOCUMENT_TOKENS, 400) / TOKENS_PER_WORD)

    def setup(self, stack: ExitStack) -> None:
        if self.plan.base_url:
            self.stage = found(self.plan)
        else:
            self.stage = own_box(stack, self.plan, self.engine_in_use, "--max-batch", "8")

    def round(self, number: int) -> Figures:
        first = 10_000 * number + self.plan.seed
        shared = self._ask([first] * self.streams)
        distinct = self._ask([first + 1 + n for n in range(self.streams)])
        # A block is cached whole: what follows the document, and the block that it begins in, is each one's own.
        own_tokens = 2 * BLOCK + 24
        return {
            "failed": failures(shared) + failures(distinct),
            "prefills_of_the_document": prefills(shared, own_tokens),
            "prompt_tokens": shared[0].prompt_tokens,
            "shared_ms": took_ms(shared),
            "distinct_ms": took_ms(distinct),
            "shared_over_distinct": took_ms(shared) / took_ms(distinct),
        }

    def _ask(self, seeds: Sequence[int]) -> list[Answer]:
        bodies = [
            chat_body(
                self.stage.model,
                prose(seed, self.words) + f" Question {n}: what is in it?",
                OUTPUT,
                ignore_eos=True,
            )
            for n, seed in enumerate(seeds)
        ]
        return ask(self.stage, bodies)


SCENARIO = SharedPrefix
