"""The alphabet in which byte-level vocabularies write bytes as visible characters.

Owns the table between the 256 bytes and their characters: printable Latin-1 stands for itself, the
other bytes count up from U+0100. It must not know vocabularies.
"""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _characters() -> tuple[str, ...]:
    visible = frozenset(_PRINTABLE)
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in visible else next(others)) for byte in range(256))


CHARACTER_OF_BYTE: tuple[str, ...] = _characters()
BYTE_OF_CHARACTER: dict[str, int] = {
    character: byte for byte, character in enumerate(CHARACTER_OF_BYTE)
}
