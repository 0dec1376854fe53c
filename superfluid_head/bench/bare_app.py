"""The yardstick of `overhead`: an ASGI application that does nothing but write chunks, under uvicorn with uvloop and httptools.

Run as `python -m superfluid_head.bench.bare_app --ready-file FILE`. Its chunks have the members of a head's, one a token at `--pace`
tokens a second for every stream; all streams are woken together, as by an engine's step. It is also the server behind the routers
of others, so that all are measured on the same chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

MODEL = "bare"
WORDS = (" the", " water", " under", " a", " quiet", " bridge", " goes", " on", ",", " and")
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"

Messages = Callable[[], Awaitable[dict[str, Any]]]
Sender = Callable[[dict[str, Any]], Awaitable[None]]


def chunk(content: str, finish: str | None = None) -> bytes:
    """Format one chunk, as anybody would."""
    choice = {
        "index": 0,
        "delta": {} if finish else {"content": content},
        "logprobs": None,
        "finish_reason": finish,
    }
    body = {
        "id": "chatcmpl-000000000000000000000000",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [choice],
    }
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


class BareApp:
    """The application. One pulse wakes every stream."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._pulse: asyncio.Event | None = None

    async def __call__(self, scope: dict[str, Any], receive: Messages, send: Sender) -> None:
        if scope["method"] == "POST":
            await self._stream(await _body(receive), send)
            return
        listed = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]}
        data = json.dumps(listed).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _stream(self, body: dict[str, Any], send: Sender) -> None:
        count = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        for number in range(count):
            if number:  # the first leaves at once: what it takes is the way, not the engine
                await self._next_pulse()
            data = chunk(WORDS[number % len(WORDS)])
            await send({"type": "http.response.body", "body": data, "more_body": True})
        data = chunk("", "length") + DONE
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _next_pulse(self) -> None:
        if self._pulse is None:
            self._pulse = asyncio.Event()
            asyncio.get_running_loop().call_later(1 / self._pace, self._beat, self._pulse)
        await self._pulse.wait()

    def _beat(self, pulse: asyncio.Event) -> None:
        self._pulse = None
        pulse.set()


async def _body(receive: Messages) -> dict[str, Any]:
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body"):
            found: dict[str, Any] = json.loads(data)
            return found


def main() -> None:
    """Serve until told to stop."""
    import uvicorn

    parser = argparse.ArgumentParser(description="Serve chunks that cost nothing to make.")
    parser.add_argument("--ready-file", required=True)
    parser.add_argument("--pace", type=float, default=50.0, help="Tokens a second of a stream.")
    given = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1_024)
    facts = {"pid": os.getpid(), "http": [list(listener.getsockname()[:2])]}
    draft = Path(given.ready_file + ".new")
    draft.write_text(json.dumps(facts), encoding="utf-8")
    draft.replace(given.ready_file)
    config = uvicorn.Config(
        BareApp(given.pace), http="httptools", loop="uvloop", lifespan="off", log_level="warning",
        access_log=False,
    )  # fmt: skip
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
