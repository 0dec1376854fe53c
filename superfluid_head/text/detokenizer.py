"""Token ids to text, one id at a time: bytes are held until a character is complete.

Owns the UTF-8 state of one choice and knows which tokens are shown. It must not know stop strings, chunks or HTTP.
Text comes out *un-skipped*, as pieces that say whether they are shown: stop strings are matched on everything,
readers see only the shown part. A special token is a border: bytes that were still open before it can no longer be
completed and become U+FFFD there; otherwise U+FFFD appears only where the bytes are proven invalid, or at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import NamedTuple

TokenBytes = Callable[[int], bytes]


class Piece(NamedTuple):
    """Some un-skipped text and whether readers see it."""

    text: str
    is_shown: bool


class Detokenizer:
    """The decode of one choice. `push` and `finish` mutate it; the pieces of all calls concatenate to the text."""

    __slots__ = ("_open", "_skip_special", "_token_bytes", "special_ids")

    def __init__(
        self, token_bytes: TokenBytes, special_ids: frozenset[int], *, skip_special: bool = True
    ) -> None:
        self._token_bytes = token_bytes
        self.special_ids = special_ids
        self._skip_special = skip_special
        self._open = b""

    def shows(self, token: int) -> bool:
        """Whether readers see the text of `token`."""
        return not (self._skip_special and token in self.special_ids)

    @property
    def is_open(self) -> bool:
        """Whether bytes wait for the rest of their character."""
        return bool(self._open)

    def push(self, token: int) -> tuple[Piece, ...]:
        """Decode one more id; returns what became certain, possibly nothing."""
        if token not in self.special_ids:
            text = self.decode(token)
            return (Piece(text, True),) if text else ()
        pieces = self.finish()
        text = self._token_bytes(token).decode("utf-8", "replace")
        return (*pieces, Piece(text, self.shows(token))) if text else pieces

    def decode(self, token: int) -> str:
        """Decode one more id that is not special, and so is shown; returns what became certain."""
        data = self._open + self._token_bytes(token)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._open = data[used:]
        return text

    def finish(self) -> tuple[Piece, ...]:
        """Give up on an open character: it becomes U+FFFD."""
        text, _ = codecs.utf_8_decode(self._open, "replace", True)
        self._open = b""
        return (Piece(text, True),) if text else ()
