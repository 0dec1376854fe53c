"""One regular expression that finds the longest of many literals, in time that does not grow.

Owns the prefix tree from which the expression is written: an alternation of a thousand literals
would be tried one by one at each character. It must not know tokens. The invariant: at any place
the expression matches the longest literal that begins there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from superfluid_core.errors import ModelFilesError

LITERALS_MAX = 1 << 16
LITERAL_CHARS_MAX = 512


class _Branch:
    """A place in the prefix tree: where the next character leads, whether a literal ends here."""

    __slots__ = ("ends", "next")

    def __init__(self) -> None:
        self.next: dict[str, _Branch] = {}
        self.ends = False


def pattern_of(literals: Iterable[str]) -> re.Pattern[str] | None:
    """Compile an expression for `literals`; None when there are none."""
    source = _source(literals)
    return re.compile(source) if source else None


def start_pattern_of(literals: Iterable[str]) -> re.Pattern[str] | None:
    """Compile an expression that matches the one character at which any of `literals` begins."""
    source = _source(literals)
    return re.compile(f"(?={source}).", re.DOTALL) if source else None


def _source(literals: Iterable[str]) -> str:
    root = _Branch()
    for count, literal in enumerate(literals):
        if count >= LITERALS_MAX or len(literal) > LITERAL_CHARS_MAX:
            raise ModelFilesError("too many or too long special tokens")
        branch = root
        for character in literal:
            branch = branch.next.setdefault(character, _Branch())
        branch.ends = branch is not root
    if not root.next:
        return ""
    try:
        return _written(root)
    except RecursionError as cause:
        raise ModelFilesError("special tokens that begin alike nest too deeply") from cause


def _written(branch: _Branch) -> str:
    """Write the part of the tree under `branch`; chains without forks become plain text."""
    choices: list[str] = []
    for character, following in branch.next.items():
        text = [re.escape(character)]
        at = following
        while len(at.next) == 1 and not at.ends:
            ((only, at),) = at.next.items()
            text.append(re.escape(only))
        choices.append("".join(text) + (_written(at) if at.next else ""))
    return f"(?:{'|'.join(choices)})" + ("?" if branch.ends else "")
