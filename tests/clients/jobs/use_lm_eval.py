"""lm-evaluation-harness: its local-completions and local-chat-completions models, asked directly; no data set is loaded."""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from tests.clients.jobs.kit import MODEL, URL, need, report


def ask(words: Any) -> list[Instance]:
    options = {"until": ["\n\n"], "max_gen_toks": 16, "temperature": 0}
    return [
        Instance("generate_until", {}, (each, dict(options)), index)
        for index, each in enumerate(words)
    ]


def whole() -> None:
    made = LocalCompletionsAPI(
        base_url=f"{URL}/v1/completions", model=MODEL, tokenizer_backend=None, batch_size=2,
        tokenized_requests=False, max_length=2_048,
    )  # fmt: skip
    found = made.generate_until(ask(["Once upon a time", "The capital of France is"]))
    need(len(found) == 2 and all(found), found)


def chat() -> None:
    made = LocalChatCompletion(
        base_url=f"{URL}/v1/chat/completions", model=MODEL, tokenizer_backend=None,
        tokenized_requests=False,
    )  # fmt: skip
    templated = made.apply_chat_template([{"role": "user", "content": "Hello."}])
    found = made.generate_until(ask([templated]))
    need(len(found) == 1 and found[0], found)


if __name__ == "__main__":
    report(whole=whole, chat=chat)
