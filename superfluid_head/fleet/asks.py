"""Questions to a node that are answered in numbered pieces: its model's text files, its statistics, its sessions, vectors of texts.

Bounded: ASKS_MAX questions a link (and EMBEDS_MAX texts, which have numbers of their own and may be refused), each with a deadline, answers up to the size of the largest file. Pieces of one answer come in
order, since a link keeps order; one that does not is a broken answer. When the link is lost every question fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from superfluid_core.errors import (
    CapacityError,
    ErrorCode,
    GenerationError,
    InvalidRequestError,
    RemoteProtocolError,
    SuperfluidError,
)
from superfluid_core.limits import WireLimits
from superfluid_core.wire.messages import (
    Embed,
    Embedded,
    FileAsk,
    FilePiece,
    Message,
    Refuse,
    SessionRow,
    Sessions,
    SessionsAsk,
    Stats,
    StatsAsk,
)

ASKS_MAX = 16
EMBEDS_MAX = 32
ASK_MS_MAX = 30_000
EMBED_MS_MAX = 300_000
SESSION_BITS = 64
SESSION_ROWS_MAX = 65_536


class Asker(Protocol):
    """A node that can be asked."""

    @property
    def asks(self) -> Asks: ...

    def send(self, message: Message) -> bool: ...


@dataclass(slots=True)
class _Answer:
    done: asyncio.Future[None]
    pieces: list[bytes] = field(default_factory=list)
    rows: list[SessionRow] = field(default_factory=list)
    bytes: int = 0
    digest: str = ""


class Asks:
    """The open questions of one node."""

    def __init__(self) -> None:
        self._open: dict[int, _Answer] = {}
        self._embeds: dict[int, _Answer] = {}
        self._number = 0

    @property
    def newest(self) -> int:
        """Number of the last question asked."""
        return self._number

    def are_answered(self, newest: int) -> bool:
        """Whether no question up to that number is open."""
        return all(number > newest for number in self._open)

    def take(self, message: Message) -> None:
        """Fold a piece in; messages that answer nothing are ignored."""
        match message:
            case FilePiece() | Stats():
                answer = self._open.get(message.request)
                if answer is not None:
                    answer.bytes += len(message.data)
                    answer.pieces.append(message.data)
                    answer.digest = message.digest if isinstance(message, FilePiece) else ""
                    self._count(answer, len(answer.pieces), message.piece, message.pieces)
            case Sessions():
                answer = self._open.get(message.request)
                if answer is not None:
                    answer.rows.extend(message.rows)
                    answer.pieces.append(b"")
                    self._count(answer, len(answer.pieces), message.piece, message.pieces)
            case Embedded():
                answer = self._embeds.get(message.session)
                if answer is not None:
                    answer.bytes += len(message.data)
                    answer.pieces.append(message.data)
                    self._count(answer, len(answer.pieces), message.piece, message.pieces)
            case _:
                return

    @property
    def embeds(self) -> int:
        """How many texts are being embedded."""
        return len(self._embeds)

    def refuse(self, refusal: Refuse) -> bool:
        """Take a refusal, if it is one of a text."""
        answer = self._embeds.get(refusal.session)
        if answer is None:
            return False
        if not answer.done.done():
            answer.done.set_exception(_refused(refusal))
        return True

    def break_off(self) -> None:
        """Fail every question: the link is gone."""
        for answer in (*self._open.values(), *self._embeds.values()):
            if not answer.done.done():
                answer.done.set_exception(
                    GenerationError("the node was lost while it answered", code=ErrorCode.NODE_LOST)
                )
        self._open.clear()
        self._embeds.clear()

    async def file(self, node: Asker, model: str, name: str) -> bytes | None:
        """Fetch one text file of `model`, or None when the node has none of that name."""
        answer = await self._ask(node, lambda number: FileAsk(number, model, name))
        if not answer.digest:
            return None
        data = b"".join(answer.pieces)
        if hashlib.sha256(data).hexdigest() != answer.digest:
            raise RemoteProtocolError(f"the digest of {name} does not match its bytes")
        return data

    async def stats(self, node: Asker) -> bytes:
        """Fetch the node's metrics and scheduler stats, as JSON."""
        answer = await self._ask(node, StatsAsk)
        return b"".join(answer.pieces)

    async def sessions(self, node: Asker) -> list[SessionRow]:
        """Fetch what runs and waits on the node."""
        answer = await self._ask(node, SessionsAsk)
        return answer.rows

    async def embed(self, node: Asker, model: str, pooling: str, ids: tuple[int, ...]) -> bytes:
        """Have a text embedded: little-endian float32. Raises SuperfluidError."""
        if len(self._embeds) >= EMBEDS_MAX:
            words = "too many texts are being embedded"
            raise CapacityError(words, code=ErrorCode.OVERLOADED, retry_after_ms=1_000)
        number = secrets.randbits(SESSION_BITS) or 1
        ask = Embed(number, model, pooling, ids)
        return b"".join((await self._hear(node, self._embeds, number, ask)).pieces)

    async def _ask(self, node: Asker, ask: Callable[[int], Message]) -> _Answer:
        if len(self._open) >= ASKS_MAX:
            raise CapacityError("too many questions to this node are open")
        self._number += 1
        return await self._hear(node, self._open, self._number, ask(self._number))

    async def _hear(
        self, node: Asker, places: dict[int, _Answer], number: int, ask: Message
    ) -> _Answer:
        answer = _Answer(asyncio.get_running_loop().create_future())
        places[number] = answer
        try:
            if not node.send(ask):
                raise GenerationError("the node is not linked", code=ErrorCode.NODE_LOST)
            longest = EMBED_MS_MAX if isinstance(ask, Embed) else ASK_MS_MAX
            async with asyncio.timeout(longest / 1_000):
                await answer.done
        except TimeoutError:
            raise GenerationError(
                "the node did not answer in time", code=ErrorCode.TIMEOUT
            ) from None
        finally:
            places.pop(number, None)
        return answer

    def _count(self, answer: _Answer, seen: int, piece: int, pieces: int) -> None:
        """Judge the piece that was just taken; the last one completes the answer."""
        if answer.done.done():
            return
        too_long = answer.bytes > WireLimits().file_bytes_max or len(answer.rows) > SESSION_ROWS_MAX
        if too_long or piece != seen - 1:
            answer.done.set_exception(RemoteProtocolError("an answer came broken"))
        elif seen == pieces:
            answer.done.set_result(None)


def _refused(refusal: Refuse) -> SuperfluidError:
    """Make the failure that a node told; only what the request itself is to blame for is the caller's."""
    code = refusal.code
    if code in (
        ErrorCode.UNSUPPORTED,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ):
        return InvalidRequestError(refusal.text, param="input", code=code)
    if code in (ErrorCode.OVERLOADED, ErrorCode.DRAINING):
        return CapacityError(refusal.text, code=code, retry_after_ms=refusal.retry_after_ms)
    return GenerationError(refusal.text, code=code)
