"""What a grammar lets a model write, the reader of the same dialect understands: random answers along the mask of each."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass

import pytest

from superfluid_core.grammar.compiler import Vocabulary, build_tokenizer, compile_source
from superfluid_core.grammar.sources import source_of
from superfluid_head.text.constraints import JsonText
from superfluid_head.text.dialects.detect import DIALECTS
from superfluid_head.text.dialects.dialect import CALL_PARSERS, Dialect, Reading
from superfluid_head.text.dialects.events import Tool
from superfluid_head.text.dialects.thinking import Opening
from superfluid_head.text.grammar import compose
from tests.unit.head_text.dialect_samples import Parsed, parse

END = 256
STEPS_MAX = 700
TOOLS = {
    "set": Tool(
        "set",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
                "mode": {"enum": ["a", "b c"]},
                "many": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            },
            "required": ["name", "mode"],
            "additionalProperties": False,
        },
    ),
    "now": Tool("now"),
}
ANSWER = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}  # fmt: skip


@functools.cache
def vocabulary(dialect: Dialect) -> tuple[Vocabulary, dict[str, int]]:
    """Every byte is a token, and so is each marker that is shaped like a control token."""
    specials = [m for m in dialect.markers if m.startswith(("<|", "<｜", "[")) and len(m) > 1]
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"] + [m.encode() for m in specials]
    ids = {marker: 257 + at for at, marker in enumerate(specials)}
    return Vocabulary(tuple(tokens), (END,), frozenset({END, *ids.values()})), ids


@dataclass
class Walk:
    """One random way through a grammar."""

    pieces: list[str]
    is_whole: bool


def walk(dialect: Dialect, source: str, seed: int) -> Walk:
    """Follow the mask at random, with a liking for what ends strings and values; ends where the grammar allows it."""
    words, ids = vocabulary(dialect)
    texts = {token: marker for marker, token in ids.items()}
    matcher = compile_source(build_tokenizer(words), source)
    dice = random.Random(seed)
    taken: list[int] = []
    closers = [m.encode() for m in dialect.markers if m not in ids and m[:1] in "<[H"]
    while len(taken) < STEPS_MAX:
        if closers and dice.random() < 0.1:
            spelled = list(dice.choice((b"", b"\n")) + dice.choice(closers))
            taken += spelled[: matcher.try_consume_tokens(spelled)]
        mask = matcher.compute_bitmask()
        allowed = [t for t in range(len(words.tokens)) if mask[t // 8] >> (t % 8) & 1]
        if END in allowed and dice.random() < 0.7:
            break
        ordinary = [t for t in allowed if t != END and (t > END or chr(t) in GOOD)]
        liked = [t for t in ordinary if t > END or chr(t) in '"}])<\n,']
        usual = liked if liked and dice.random() < 0.5 else ordinary
        chosen = dice.choice(usual or [t for t in allowed if t != END] or [END])
        if chosen == END:
            break
        assert matcher.consume_token(chosen)
        taken.append(chosen)
    pieces, text = [], b""
    for token in taken:
        if token in texts:
            pieces += [text.decode("utf-8", "replace"), texts[token]]
            text = b""
        else:
            text += words.tokens[token]
    pieces.append(text.decode("utf-8", "replace"))
    return Walk([piece for piece in pieces if piece], matcher.is_accepting())


GOOD = 'abcdefnosxtrulmy 0123456789"{}[]()<>/=:,;.|_-\n'


def read(dialect: Dialect, found: Walk, opening: Opening) -> Parsed:
    _, ids = vocabulary(dialect)
    return parse(dialect, found.pieces, frozenset(ids), tools=TOOLS, opening=opening)


def judge(call: str, arguments: str) -> None:
    value = json.loads(arguments)
    if call == "now":
        assert value == {}
        return
    assert {"name", "mode"} <= set(value) <= {"name", "mode", "n", "many"}
    assert isinstance(value["name"], str)
    assert value["mode"] in ("a", "b c")
    assert type(value.get("n", 0)) is int


@pytest.mark.parametrize("name", CALL_PARSERS)
def test_enforced_calls_are_read_as_calls_and_nothing_else(name: str) -> None:
    dialect = Dialect(name, "harmony" if name == "harmony" else "think")
    whole = 0
    for seed, opening in enumerate((Opening.BEHIND, Opening.FRESH, Opening.INSIDE, Opening.BEHIND)):
        shape = dialect.call_shape(list(TOOLS.values()), opening, 2)
        _, ids = vocabulary(dialect)
        source = source_of(compose(None, ids.get, instead=shape))
        for turn in range(2):
            found = walk(dialect, source, 10 * seed + turn)
            parsed = read(dialect, found, opening)
            if not found.is_whole:
                continue
            whole += 1
            assert 1 <= len(parsed.calls) <= 2
            assert parsed.content.strip() == ""
            for call in parsed.calls:
                assert call.is_complete
                judge(call.name, call.text)
    assert whole >= 3


@pytest.mark.parametrize(
    "dialect", sorted({d for d in DIALECTS.values() if d.reasoning}, key=str), ids=str
)
def test_enforced_content_is_read_as_content_behind_the_reasoning(dialect: Dialect) -> None:
    _, ids = vocabulary(dialect)
    for seed, opening in enumerate(Opening):
        before = dialect.before_content(opening)
        source = source_of(compose(JsonText(ANSWER), ids.get, before=before))
        found = walk(dialect, source, seed)
        if found.is_whole:
            reads = dialect.reader(Reading(opening=opening, tools=TOOLS)) is not None
            parsed = read(dialect, found, opening) if reads else Parsed("".join(found.pieces))
            assert set(json.loads(parsed.content)) == {"x"}
            assert parsed.calls == []


def test_a_dialect_without_calls_has_no_shape_for_them() -> None:
    assert Dialect(None, "think").call_shape(list(TOOLS.values()), Opening.FRESH, None) is None
    assert Dialect(None, None).reader(Reading()) is None
