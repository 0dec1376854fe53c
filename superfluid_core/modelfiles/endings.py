"""Tokens that end a turn or a text, and tokens that look like control, by their spelling.

Owns the list of spellings that published vocabularies use to end a generation. It must not know
files or tokenizers. The idea: files often declare only one end (or the wrong one), and a model that
has said `<|im_end|>` has nothing more to say, whichever id its file calls EOS.
"""

from __future__ import annotations

from collections.abc import Iterable

ENDINGS = (
    "</s>",
    "<eos>",
    "[EOS]",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
)
_BARS = ("|", "｜")


def is_control_shaped(token: str) -> bool:
    """Whether a token is spelled `<|like this|>`: nobody's ordinary text is."""
    return (
        len(token) > 4
        and token[:1] == "<"
        and token[-1:] == ">"
        and (token[1] in _BARS and token[-2] in _BARS)
    )


def ending_ids(tokens: Iterable[str]) -> tuple[int, ...]:
    """Where the known endings stand in a vocabulary, in the order of the vocabulary."""
    known = frozenset(ENDINGS)
    return tuple(index for index, token in enumerate(tokens) if token in known)
