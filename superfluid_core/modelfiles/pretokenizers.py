r"""How byte-level BPE vocabularies cut text into words before merging, by their name in GGUF.

Owns the table from `tokenizer.ggml.pre` to the regular expressions of that vocabulary, applied one
after another, each isolating its matches. It must not know vocabularies or merges. The idea: a
wrong cut gives plausible but wrong ids, so a name that is not in the table is refused, and every
name in it is compared with another implementation in the tests. The trailing `\s+` of the published
expressions is left out where it changes nothing: what no expression matches is a word by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from superfluid_core.errors import ModelFilesError


def _characters(ranges: str) -> str:
    r"""Write hexadecimal code points and ranges of them as the inside of a character class."""
    parts = [[f"\\x{{{code}}}" for code in part.split("-")] for part in ranges.split()]
    return "".join("-".join(ends) for ends in parts)


# the parts from which the published expressions are made
_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER_LOWER = r"((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+"
_UPPER = r"((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*"
_SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_TEKKEN = rf"{_LEAD}{_UPPER_LOWER}|{_LEAD}{_UPPER}|\p{{N}}|{_SIGNS_SLASH}|{_LINES}"
_GPT4O = (
    rf"{_LEAD}{_UPPER_LOWER}{_ENDINGS}?|{_LEAD}{_UPPER}{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS_SLASH}|{_LINES}"
)
_DEEPSEEK_LETTERS = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD "
    "1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D "
    "1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 "
    "1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE "
    "2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 "
    "FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 "
    "118A0-118DF 1E900-1E943"
)
# blanks lie within the published ranges of the next two and are kept out, as llama.cpp does
_DEEPSEEK_SIGNS = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3001-3002")
_CJK_HANGUL = _characters(
    "4E00-9FA5 800-167F 1681-1FFF 200B-2027 202A-202E 2030-205E 2060-2FFF 3001-4E00 AC00-D7FF"
)
_CJK_KANA = _characters("4E00-9FA5 3040-309F 30A0-30FF")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    rf"[{_CJK_KANA}]+",
    (
        rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
    ),
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    rf"\s?[{_DEEPSEEK_SIGNS}]+",
    r"\s+$",
    rf"[{_CJK_HANGUL}]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"[{_CJK_HANGUL}]+", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The expressions of one vocabulary, and what else its name implies.

    `whole_words`: a word that is a token as it stands is not taken apart for merging.
    `adds_bos`: the vocabulary begins texts with BOS unless the file says otherwise.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False


_BY_SHAPE: tuple[tuple[PreTokenizer, tuple[str, ...]], ...] = (
    (PreTokenizer(_DEFAULT), ("default",)),
    (
        PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True),
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    (PreTokenizer((_LLAMA3,)), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (
        PreTokenizer((_QWEN2,)),
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "grok-2", "solar-open"),
    ),
    (PreTokenizer((_QWEN35,)), ("qwen35",)),
    (
        PreTokenizer((_GPT2,)),
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "a.x-4.0"),
    ),
    (
        PreTokenizer((_GPT2,)),
        ("mellum", "granite-docling"),
    ),
    (
        PreTokenizer(_DIGITS_GPT2),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    (PreTokenizer(_FALCON), ("falcon",)),
    (PreTokenizer(_DEEPSEEK_LLM), ("deepseek-llm",)),
    (PreTokenizer(_DEEPSEEK_CODER), ("deepseek-coder",)),
    (PreTokenizer(_DEEPSEEK3), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True), ("tekken",)),
    (PreTokenizer((_GPT4O,)), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (PreTokenizer((_BLOOM,)), ("bloom", "poro-chat", "gpt3-finnish")),
    (PreTokenizer((_BLOOM, r"\p{N}")), ("viking",)),
    (
        PreTokenizer((rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",)),
        ("seed-coder",),
    ),
)
PRE_TOKENIZERS = {name: shape for shape, names in _BY_SHAPE for name in names}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Look a `tokenizer.ggml.pre` up; refuses a name that is not known to be cut correctly."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise ModelFilesError(
            f"unknown pre-tokenizer {name[:60]!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return found
