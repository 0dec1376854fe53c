"""Answers by idempotency key: which request has one, and what of it is kept (access.md, Headers).

An answer belongs to who asked, the key that came with it and the body that came with it. It grows while it is made; whoever asks again
reads it from the start. Only good ones are kept, for a while and within bounds; what failed is forgotten when it ends, so that a
retry is a new try. Owns bookkeeping; it must not know HTTP beyond messages that it passes on.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from superfluid_core.clock import SECOND

KEPT_S = 600
ANSWERS_MAX = 1_024
ANSWER_BYTES_MAX = 8 * 1024 * 1024
KEPT_BYTES_MAX = 64 * 1024 * 1024

Message = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Answer:
    """One answer, whole or under way. `readers` counts the connections that it goes to, `joined` those that came later."""

    digest: bytes
    since_ns: int
    messages: list[Message] = field(default_factory=list)
    bytes: int = 0
    is_over: bool = False
    readers: int = 0
    joined: int = 0
    is_kept: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def is_read(self) -> bool:
        return self.readers > 0

    def add(self, message: Message) -> None:
        if self.is_kept or self.joined:
            self.messages.append(message)
            self.bytes += len(message.get("body", b""))
            self.tell()

    def tell(self) -> None:
        """Wake whoever waits for news of it."""
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether it came to an end of its own, good or bad, rather than being broken off."""
        last = self.messages[-1] if self.messages else {}
        return last.get("type") == "http.response.body" and not last.get("more_body", False)

    @property
    def is_good(self) -> bool:
        """Whether all of it is there, and it ended as a success."""
        if not self.is_kept or not self.has_ended or self.messages[0]["status"] >= 300:
            return False
        return not self.messages[-1].get("is_failed", False)


class Answers:
    """All of them. Event-loop only."""

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, str], Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, whose: tuple[str, str], now_ns: int) -> Answer | None:
        self._forget_old(now_ns)
        return self._answers.get(whose)

    def begin(self, whose: tuple[str, str], digest: bytes, now_ns: int) -> Answer:
        """Note that an answer is being made."""
        made = self._answers[whose] = Answer(digest, now_ns)
        return made

    def add(self, whose: tuple[str, str], answer: Answer, message: Message) -> None:
        """Add to an answer, and let go of one that has become too large to be kept."""
        answer.add(message)
        if answer.is_kept and answer.bytes > ANSWER_BYTES_MAX:
            self._drop(whose, answer)

    def _trim(self) -> None:
        """Let go of the oldest whole answers beyond the bounds."""
        size = sum(each.bytes for each in self._answers.values())
        for key, each in list(self._answers.items()):
            if size <= KEPT_BYTES_MAX and len(self._answers) <= ANSWERS_MAX:
                break
            if each.is_over:
                size -= each.bytes
                del self._answers[key]

    def end(self, whose: tuple[str, str], answer: Answer) -> None:
        """Keep what ended well, forget what did not."""
        answer.is_over = True
        answer.tell()
        if not answer.is_good:
            self._drop(whose, answer)
        self._trim()

    def _drop(self, whose: tuple[str, str], answer: Answer) -> None:
        answer.is_kept = False
        if self._answers.get(whose) is answer:
            del self._answers[whose]

    def _forget_old(self, now_ns: int) -> None:
        for key, each in list(self._answers.items()):
            if now_ns - each.since_ns < KEPT_S * SECOND:
                break
            if each.is_over:
                del self._answers[key]
