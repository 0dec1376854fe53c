"""How commands ask a running head: one JSON request over HTTP, with the caller's key, and failures as one line for a person.

Knows no route. Loopback is never proxied. The key comes from SUPERFLUID_API_KEY or a file, never from the command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from superfluid_core.errors import ConfigError, ErrorCode, SuperfluidError
from superfluid_core.link.addresses import is_loopback
from superfluid_head.config import HTTP_PORT, client_key

DEFAULT_URL = f"http://127.0.0.1:{HTTP_PORT}"
CONNECT_S = 5.0
READ_S = 30.0
WORDS_CHARS_MAX = 300

F = TypeVar("F", bound=Callable[..., Any])


def endpoint_flags(command: F) -> F:
    """Add --url and --api-key-file to a command."""
    command = click.option("--api-key-file", metavar="FILE", help="File that holds the API key.")(
        command
    )
    return click.option("--url", default=DEFAULT_URL, show_default=True, help="The head.")(command)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a head said. `code` and `words` are those of its error, if it is one."""

    status: int
    body: Any
    code: str = ""
    words: str = ""

    def needed(self) -> Any:
        """Return the body of a success. Raises SuperfluidError for anything else."""
        if self.status != 200 or not isinstance(self.body, dict):
            raise SuperfluidError(f"refused with {self.status}: {self.words or 'no reason given'}")
        return self.body


def ask(url: str, key_file: str | None, verb: str, path: str, body: Any = None) -> Reply:
    """Ask the head at `url`. Raises SuperfluidError when it cannot be reached."""
    import httpx

    key = client_key(key_file)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
    try:
        with httpx.Client(
            base_url=url, headers=headers, timeout=timeout, trust_env=not is_local(url)
        ) as client:
            reply = client.request(verb, path, json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        words = str(error)[:WORDS_CHARS_MAX] or type(error).__name__
        raise SuperfluidError(f"{url}: {words}", code=ErrorCode.NO_WORKER) from None
    return _read(reply.status_code, reply.content)


def is_local(url: str) -> bool:
    """Whether proxies of the environment have no say: loopback is never proxied. Raises ConfigError for what is no URL."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--url {url[:200]} is no http:// or https:// address")
    return host == "localhost" or is_loopback(host)


def _read(status: int, content: bytes) -> Reply:
    try:
        body = json.loads(content)
    except ValueError:
        return Reply(status, None)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return Reply(status, body)
    code, words = error.get("code"), error.get("message")
    return Reply(status, body, str(code or ""), str(words or "")[:WORDS_CHARS_MAX])
