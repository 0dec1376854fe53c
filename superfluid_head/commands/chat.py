"""`superfluid chat`: talks to an endpoint and prints the answer as it comes. A client like any other, over HTTP.

With PROMPT it answers once; without, it reads turns from standard input and keeps the conversation. The API key comes
from SUPERFLUID_API_KEY or --api-key-file, never from the command line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_head.commands.endpoint import CONNECT_S, DEFAULT_URL, is_local
from superfluid_head.config import client_key

READ_S = 600.0
LINE_CHARS_MAX = 4 * 1024 * 1024


@click.command("chat")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The endpoint.")
@click.option("--model", metavar="NAME", help="Model to talk to.  [default: the only one]")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), metavar="T", help="Randomness.")
@click.option("--api-key-file", metavar="FILE", help="File that holds the API key.")
@click.argument("prompt", required=False)
def chat(prompt: str | None, url: str, api_key_file: str | None, **members: Any) -> None:
    """Talk to a model; PROMPT asks once, without it a conversation begins."""
    import httpx

    system = members.pop("system")
    body = {name: value for name, value in members.items() if value is not None}
    messages = [{"role": "system", "content": system}] if system else []
    key = client_key(api_key_file)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
    trust_env = not is_local(url)
    with httpx.Client(
        base_url=url, headers=headers, timeout=timeout, trust_env=trust_env
    ) as client:
        for question in _questions(prompt):
            messages.append({"role": "user", "content": question})
            try:
                answer = _say(client, {**body, "messages": messages})
            except httpx.HTTPError as error:
                raise SuperfluidError(f"{url}: {_words(error)}", code=ErrorCode.NO_WORKER) from None
            messages.append({"role": "assistant", "content": answer})


def _words(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__


def _questions(prompt: str | None) -> Iterator[str]:
    if prompt is not None:
        yield prompt
        return
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        if line.strip() in ("/exit", "/quit"):
            return
        if line.strip():
            yield line


def _say(client: Any, body: dict[str, Any]) -> str:
    """Ask, print while it streams, return the whole answer. Raises SuperfluidError."""
    parts: list[str] = []
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        if reply.status_code != 200:
            reply.read()
            raise SuperfluidError(_refusal(reply.status_code, reply.content))
        is_done = False
        for line in reply.iter_lines():
            if not line.startswith("data: ") or len(line) > LINE_CHARS_MAX:
                continue
            if line == "data: [DONE]":
                is_done = True
                break
            text = _text(json.loads(line[6:]))
            parts.append(text)
            click.echo(text, nl=False)
            sys.stdout.flush()
    click.echo()
    if not is_done:
        raise SuperfluidError("the answer was cut short", code=ErrorCode.NODE_LOST)
    return "".join(parts)


def _text(chunk: dict[str, Any]) -> str:
    """Return a chunk's text. Raises SuperfluidError for an error event."""
    if chunk.get("error"):
        click.echo()
        raise SuperfluidError(f"the answer failed: {chunk['error'].get('message', '')[:300]}")
    return "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))


def _refusal(status: int, content: bytes) -> str:
    try:
        return f"refused with {status}: {json.loads(content)['error']['message'][:500]}"
    except (ValueError, KeyError, TypeError):
        return f"refused with {status}"
