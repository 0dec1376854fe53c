"""Pages that tell how a server stands, read now and then while streams are timed in the same process.

Owns one client for all of them. To make one reads the machine's certificates: 25 ms on a slow core, in which no other thread of the
process runs, so that every stream beside it seemed to pause. Every page has a connection of its own: servers here come and go.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import httpx

SECONDS = 10.0


@cache
def _client() -> httpx.Client:
    return httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def page(
    url: str, timeout_s: float = SECONDS, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """GET it, whatever its status. Raises httpx.HTTPError when nobody answers in time."""
    return _client().get(url, timeout=timeout_s, headers=headers)
