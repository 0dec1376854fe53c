"""A server for tests of the bench's client: every connection is played by a script that writes bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from superfluid_head.bench.loops import run

SECONDS = 10.0
HEAD = b"HTTP/1.1 200 OK\r\nx-request-id: r-1\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str | None = None, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


GOOD = (event("Hé"), event("llo"), event(finish="stop"), DONE)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunked(*events: bytes) -> bytes:
    return CHUNKED + b"".join(map(chunk, events)) + chunk(b"")


def sized(data: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(data), data)


@dataclass
class Peer:
    """A connection that a server has: `number` is how many were made before it, `asked` what came on it so far."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    asked: list[bytes] = field(default_factory=list)

    async def request(self) -> bool:
        """Wait for one; false when the client has left."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await self.reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            self.asked.append(head + await self.reader.readexactly(size))
            return True
        return False

    async def is_left(self) -> bool:
        """Say whether the client closes within the time of a test."""
        async with asyncio.timeout(SECONDS):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


@dataclass
class Server:
    """A server whose every connection is served by `script`."""

    script: Callable[[Peer], Awaitable[None]]
    peers: list[Peer] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(len(self.peers), reader, writer)
        self.peers.append(peer)
        with contextlib.suppress(ConnectionError):
            await self.script(peer)
        writer.close()


def with_server(
    script: Callable[[Peer], Awaitable[None]], body: Callable[[Server], Awaitable[None]]
) -> None:
    async def scenario() -> None:
        server = Server(script)
        async with (
            asyncio.timeout(3 * SECONDS),
            await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening,
        ):
            server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            await body(server)

    run(scenario())


def answering(*parts: bytes) -> Callable[[Peer], Awaitable[None]]:
    """Answer every request with `parts`, each in a write of its own, and keep the connection."""

    async def script(peer: Peer) -> None:
        while await peer.request():
            for part in parts:
                peer.writer.write(part)
                await peer.writer.drain()
                await asyncio.sleep(0)

    return script


def ending(*parts: bytes) -> Callable[[Peer], Awaitable[None]]:
    """Answer one request and close."""

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(b"".join(parts))

    return script
