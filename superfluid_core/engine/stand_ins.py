"""What the simulated engine uses in place of a machine: something to wait with, and a vocabulary without a tokenizer.

A simulation brings a `Pause` of its own that moves a virtual clock; a node sleeps for real, and can be woken.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Pause(Protocol):
    """How a simulated step takes time: really, or by moving a virtual clock."""

    def wait(self, seconds: float) -> bool:
        """Let that much time pass; False as soon as `close` was called."""
        ...

    def close(self) -> None: ...


class ThreadPause:
    """Sleeps for real; `close` wakes the sleeper from any thread."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def wait(self, seconds: float) -> bool:
        return not self._closed.wait(seconds)

    def close(self) -> None:
        self._closed.set()


@dataclass(frozen=True, slots=True)
class NumberedTexts:
    """A vocabulary without a tokenizer: id i below 256 stands for byte i, the last id ends a text."""

    vocabulary: int = 4096

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (self.vocabulary - 1,)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.eos_ids)

    def ordinary_ids(self) -> Sequence[int]:
        return range(self.vocabulary - 1)

    def token_bytes(self, token: int, /) -> bytes:
        return bytes((token,)) if 0 <= token < 256 else b""

    def spell(self, data: bytes, /) -> list[int]:
        return list(data)
