"""Strings for comparing tokenizers: a seeded generator, so a failure can be repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

SEED = 20_261_129
_TEXT = """
the quick brown fox jumps over lazy dogs I'll you're HE'S don'T we've Straße naïve café
Ωμέγα привет мир שלום مرحبا بالعالم नमस्ते สวัสดี こんにちは 世界 안녕하세요 你好 ﬁn ǅ Ǆungla
camelCaseWord HTTPServer snake_case_name x86_64 e=mc² ½ ⅷ ١٢٣ 12,345.67 0xFF 1e-9 $3.50
#tag @user
"""
WORDS = tuple(_TEXT.split())
CODE = (
    "def f(x: int) -> str:\n    return f'{x!r}'\n",
    "for (int i = 0; i < n; ++i) {\n\ta[i] += b[i] * 2;\n}\n",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';\r\n",
    '<div class="a">text &amp; more</div>\n\n\n',
    '{"key": [1, 2.5, null, true], "nested": {"a": "\\u00e9"}}',
    "$ ls -la | grep '^d' && echo done\n",
)
EMOJI = ("😀", "👩‍👩‍👧‍👦", "🇩🇪", "❤️", "👍🏽", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "☃")
BLANKS = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u200b",
    " \n ",
)
SCRIPTS = (
    (0x20, 0x7E),
    (0xA1, 0x17F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x5D0, 0x5EA),
    (0x620, 0x64A),
    (0x900, 0x939),
    (0xE01, 0xE3A),
    (0x1100, 0x1112),
    (0x3041, 0x3096),
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1F64F),
    (0x2000, 0x206F),
    (0x2190, 0x22FF),
)


def corpus(count: int, specials: Sequence[str] = (), *, seed: int = SEED) -> list[str]:
    """`count` strings of every kind in turn; the same seed gives the same strings."""
    draw = random.Random(seed)
    kinds: tuple[Callable[[random.Random], str], ...] = (
        _words,
        _unicode,
        _one_script,
        _emoji,
        _code,
        _blanks,
        _numbers,
        _latin_bytes,
        _controls,
        _runs,
        lambda draw: _specials(draw, specials),
        _mixed,
    )
    return [kinds[index % len(kinds)](draw) for index in range(count)]


def _words(draw: random.Random) -> str:
    return draw.choice(("", " ", "\n")) + " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))


def _unicode(draw: random.Random) -> str:
    """Any assigned-looking character of the basic plane, surrogates left out."""
    found: list[str] = []
    while len(found) < draw.randint(1, 16):
        code = draw.randint(1, 0xFFFD)
        if not 0xD800 <= code <= 0xDFFF:
            found.append(chr(code))
    return "".join(found)


def _one_script(draw: random.Random) -> str:
    low, high = draw.choice(SCRIPTS)
    return "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 24)))


def _emoji(draw: random.Random) -> str:
    return "".join(draw.choice((*EMOJI, " ", "a", "!")) for _ in range(draw.randint(1, 8)))


def _code(draw: random.Random) -> str:
    return "".join(draw.choices(CODE, k=draw.randint(1, 3)))


def _blanks(draw: random.Random) -> str:
    return "".join(draw.choice((*BLANKS, "a", "1", ".")) for _ in range(draw.randint(1, 20)))


def _numbers(draw: random.Random) -> str:
    made = [str(draw.randint(0, 10 ** draw.randint(1, 15))) for _ in range(draw.randint(1, 5))]
    return draw.choice((" ", ",", "", ".", "-", "/")).join(made)


def _latin_bytes(draw: random.Random) -> str:
    return draw.randbytes(draw.randint(1, 32)).decode("latin-1")


def _controls(draw: random.Random) -> str:
    return "".join(chr(draw.choice((draw.randint(0, 31), 127, 97))) for _ in range(8))


def _runs(draw: random.Random) -> str:
    return "".join(
        draw.choice("a e=-_.\n\t#世é0ab") * draw.randint(1, 40) for _ in range(draw.randint(1, 4))
    )


def _specials(draw: random.Random, specials: Sequence[str]) -> str:
    pool = (*specials, "<|", "|>", "<s", " text ", "\n", "<|im_", "end|>", "▁", "<0x0A>")
    return "".join(draw.choice(pool) for _ in range(draw.randint(1, 8)))


def _mixed(draw: random.Random) -> str:
    kinds = (_words, _one_script, _emoji, _code, _blanks, _numbers)
    return "".join(draw.choice(kinds)(draw) for _ in range(draw.randint(2, 4)))
