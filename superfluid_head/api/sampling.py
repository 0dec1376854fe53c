"""From a validated body to what a generation needs: sampling, stop ids, budgets, judged against the model.

Pure. Cross-member rules and everything that depends on vocabulary or window live here, so that every endpoint refuses
the same things in the same words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from superfluid_core.session import SamplingParams
from superfluid_head.api.errors import invalid
from superfluid_head.api.schemas.chat import ChatRequest, SamplingMembers

SEED_MASK = (1 << 64) - 1


def judge_chat(body: ChatRequest) -> None:
    """Rules between members. Raises ApiError 400."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: true", param="stream_options")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise invalid(
                "add_generation_prompt and continue_final_message exclude each other",
                param="add_generation_prompt",
            )
        if body.messages[-1].role != "assistant":
            raise invalid(
                "continue_final_message needs a last message of the assistant",
                param="continue_final_message",
            )


def judge_ids(body: SamplingMembers, vocabulary: int) -> None:
    """Token ids must exist. Raises ApiError 400."""
    named: list[tuple[str, Sequence[int]]] = [
        ("stop_token_ids", body.stop_token_ids or ()),
        ("allowed_token_ids", body.allowed_token_ids or ()),
        ("logit_bias", [int(key) for key in body.logit_bias or ()]),
    ]
    for name, ids in named:
        if any(token >= vocabulary for token in ids):
            raise invalid(f"a token id is not below {vocabulary}", param=name)


def judge_constrained(body: SamplingMembers) -> None:
    """Refuse what would have to go on behind the end of a constrained text. Raises ApiError 400."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            words = (
                f"{name} and a constraint exclude each other: the text ends where its grammar does"
            )
            raise invalid(words, param=name, code="unsupported_value")


def cut(prompt: tuple[int, ...], body: SamplingMembers) -> tuple[int, ...]:
    """Keep the end of a prompt, if the request says how much of it."""
    most = body.truncate_prompt_tokens
    return prompt if most is None else prompt[-most:]


def sampling_params(
    body: SamplingMembers,
    entropy: int,
    bad_words: tuple[tuple[int, ...], ...],
    logprobs: int | None,
) -> SamplingParams:
    """`entropy` is the seed of a request that names none."""
    seed = entropy if body.seed is None else body.seed
    bias = sorted((int(key), value) for key, value in (body.logit_bias or {}).items())
    return SamplingParams(
        temperature=0.0 if body.temperature < 1e-5 else body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=seed & SEED_MASK,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(bias),
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        bad_words=bad_words,
        logprobs=logprobs,
    )


def judge_minimum(minimum: int, maximum: int) -> None:
    """`min_tokens` is judged against the resolved budget. Raises ApiError 400."""
    if minimum > maximum:
        raise invalid(
            f"min_tokens is {minimum}, but only {maximum} tokens may be generated",
            param="min_tokens",
        )


def salt(tenant: str, cache_salt: str | None) -> bytes:
    """Return what separates prefix caches: tenants always, and what a request asks for on top (domain-separated)."""
    digest = hashlib.sha256(b"superfluid prefix scope\0")
    for part in (tenant, cache_salt or ""):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()[:16]
