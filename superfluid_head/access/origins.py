"""Which web pages may ask, and what their browsers are told (access.md, Listeners and browsers; http_api G10).

A page of another origin is refused unless the operator listed that. Preflights of listed ones are answered without a key, which
browsers never send with them, and every reply to one, errors too, says that it may be read. Cookies play no part: credentials are
never allowed, so `*` gives a page nothing that its reader could not fetch without a browser. Knows header values only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

Headers = list[tuple[bytes, bytes]]

ANY = "*"
MAX_AGE_S = 7_200
ASKED_CHARS_MAX = 2_048
METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
ALLOWED = b"authorization, content-type, x-api-key, idempotency-key, x-request-id"
EXPOSED = (
    b"x-request-id, request-id, retry-after, x-should-retry, idempotent-replayed, "
    b"x-superfluid-warm, x-superfluid-moves, x-superfluid-node"
)

_ASKED = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]*")


def parse_origin(text: str) -> str:
    """Parse `--cors-origin`: scheme://host[:port], or * for all. Raises ValueError."""
    origin = text.strip().lower().rstrip("/")
    if origin == ANY:
        return ANY
    try:
        parts = urlsplit(origin)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_one = is_one and origin == f"{parts.scheme}://{parts.netloc}" and "@" not in origin
        parts.port  # noqa: B018 - raises for a port that is none
    except ValueError:
        is_one = False
    if not is_one or not origin.isascii() or not origin.isprintable() or " " in origin:
        raise ValueError(f"not an origin such as https://app.example, or *: {text[:60]!r}")
    return origin


class Origins:
    """The origins that the operator listed."""

    def __init__(self, listed: Iterable[str] = ()) -> None:
        self._listed = frozenset(listed)

    def allow(self, origin: str) -> bool:
        return ANY in self._listed or origin.lower() in self._listed

    def headers(self, origin: str) -> Headers:
        """Return what every reply to a page of `origin`, which is listed, says."""
        value = b"*" if ANY in self._listed else origin.encode("latin-1")
        found: Headers = [
            (b"access-control-allow-origin", value),
            (b"access-control-expose-headers", EXPOSED),
        ]
        return found if ANY in self._listed else [*found, (b"vary", b"origin")]

    def preflight(self, asked: str | None, *, is_private: bool) -> Headers:
        """Return what a preflight is told beside that; `asked` are the headers that the page wants to send."""
        listed = ALLOWED
        if asked and len(asked) <= ASKED_CHARS_MAX and _ASKED.fullmatch(asked):
            listed += b", " + asked.encode("ascii")
        found: Headers = [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-allow-headers", listed),
            (b"access-control-max-age", str(MAX_AGE_S).encode()),
        ]
        return [*found, (b"access-control-allow-private-network", b"true")] if is_private else found
