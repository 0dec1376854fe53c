"""From the prompts of a completion to ids: raw text, ids as they are, and fill-in-the-middle; judged against the model.

A raw prompt is the model's own language: control tokens that are spelled in it become control ids, unlike anywhere else. Around a
middle they do not, for the text there is a file's. BOS comes where the vocabulary wants one and the caller did not say no.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from superfluid_core.session import TokenLogprobs
from superfluid_head.api.errors import invalid
from superfluid_head.api.sampling import cut
from superfluid_head.api.schemas.completions import CompletionRequest, prompts_of
from superfluid_head.api.schemas.texts import Ids, are_known
from superfluid_head.text.chat import ModelText
from superfluid_head.text.detokenizer import Detokenizer
from superfluid_head.text.fim import Fim, find_fim


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids, its text for the echo, and what is known of its ids from the second one on, where that was asked for."""

    ids: Ids
    text: str = ""
    scores: tuple[TokenLogprobs, ...] = ()


def judge_completion(body: CompletionRequest, choices_max: int) -> list[str | Ids]:
    """Rules between members; gives the prompts as they came. Raises ApiError 400."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: true", param="stream_options")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens: 0 is for echo: true alone", param="max_tokens")
    if body.echo and body.suffix is not None:
        raise invalid("echo and suffix exclude each other", param="echo")
    if body.best_of is not None and body.best_of < body.n:
        raise invalid("best_of is below n", param="best_of")
    if body.tried > body.n and body.stream:
        raise invalid("best_of above n cannot be streamed", param="best_of")
    prompts = prompts_of(body.prompt)
    if len(prompts) * body.tried > choices_max:
        words = f"{len(prompts)} prompts make {len(prompts) * body.tried} choices"
        raise invalid(f"{words}; at most {choices_max} are served at once", param="prompt")
    return prompts


def judge_fim(body: CompletionRequest, text: ModelText) -> Fim | None:
    """Find the model's tokens for a suffix, None without one. Raises ApiError 400 for a model that has none."""
    if body.suffix is None:
        return None
    fim = find_fim(text.tokenizer)
    if fim is None:
        raise invalid(
            "this model has no fill-in-the-middle tokens, so it cannot honour suffix",
            param="suffix",
            code="unsupported_value",
        )
    return fim


async def encode_prompts(
    body: CompletionRequest,
    prompts: Sequence[str | Ids],
    text: ModelText,
    window: int,
    fim: Fim | None,
) -> list[Prompt]:
    """Make the ids of every prompt. Raises ApiError or InvalidRequestError."""
    vocabulary = text.tokenizer.vocabulary
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    has_bos = body.add_special_tokens and text.tokenizer.adds_bos
    if fim is None:
        if not has_bos and not all(texts):
            raise invalid("prompt is empty", param="prompt")
        coded = await text.encode_texts(texts, window, is_raw=True, add_bos=body.add_special_tokens)
        if len(texts) == len(prompts):
            return _plain(body, prompts, coded, text)
        # ids are looked at one by one, and there may be many
        return await asyncio.to_thread(_plain, body, prompts, coded, text)
    around = [*texts, body.suffix or ""]
    *coded, suffix = await text.encode_texts(around, window, is_raw=False, add_bos=False)
    encoded = iter(coded)
    bos = text.tokenizer.bos_id
    first: Ids = (bos,) if has_bos and bos is not None else ()
    return [
        Prompt((*first, *fim.assemble(_prefix(prompt, encoded, vocabulary), suffix)))
        for prompt in prompts
    ]


def _plain(
    body: CompletionRequest,
    prompts: Sequence[str | Ids],
    coded: Sequence[Ids],
    text: ModelText,
) -> list[Prompt]:
    """Join texts with their ids, and ids with their texts."""
    encoded = iter(coded)
    vocabulary = text.tokenizer.vocabulary
    return [
        Prompt(cut(next(encoded), body), prompt)
        if isinstance(prompt, str)
        else Prompt(cut(_judged(prompt, vocabulary), body), _decoded(prompt, text, body))
        for prompt in prompts
    ]


def _prefix(prompt: str | Ids, encoded: Iterator[Ids], vocabulary: int) -> Ids:
    return next(encoded) if isinstance(prompt, str) else _judged(prompt, vocabulary)


def _judged(ids: Ids, vocabulary: int) -> Ids:
    if not are_known(ids, vocabulary):
        raise invalid(f"a token id is not in 0..{vocabulary - 1}", param="prompt")
    return ids


def _decoded(ids: Ids, text: ModelText, body: CompletionRequest) -> str:
    """Read ids back for the echo; nothing is read when nobody will see it."""
    if not body.echo:
        return ""
    tokenizer = text.tokenizer
    reader = Detokenizer(
        tokenizer.token_bytes, tokenizer.special_ids, skip_special=body.skip_special_tokens
    )
    pieces = [piece for token in ids for piece in reader.push(token)] + list(reader.finish())
    return "".join(piece.text for piece in pieces if piece.is_shown)
