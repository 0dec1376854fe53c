"""Many connections of one client of httpx, in several small pools: for what is not a streamed chat, and for chats over TLS.

A pool of httpx looks at every one of its connections whenever a request begins or ends: two hundred streams that end together
took the client the better part of a second, in which it read nothing, and the pause looked like the server's. Here a request goes to
the first pool with room, so that connections are used again as they are in one large pool.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache

import httpx

POOL_SIZE = 16


@cache
def _trusted() -> ssl.SSLContext:
    """Read the certificates of the system once: a client that is made beside running streams would stop them for that long."""
    return ssl.create_default_context()


@dataclass(slots=True)
class _Pool:
    """One of the pools, and how many of its connections carry a request."""

    transport: httpx.AsyncHTTPTransport
    busy: int = 0


class _Body(httpx.AsyncByteStream):
    """A response's bytes; closing it gives the place in the pool back."""

    def __init__(self, pool: _Pool, inner: httpx.AsyncByteStream) -> None:
        self._pool, self._inner, self._is_open = pool, inner, True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._inner:
            yield part

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            self._pool.busy -= self._is_open
            self._is_open = False


class Pools(httpx.AsyncBaseTransport):
    """A transport of about `connections` connections; a request beyond them waits for one."""

    def __init__(self, connections: int) -> None:
        limits = httpx.Limits(max_connections=POOL_SIZE, max_keepalive_connections=POOL_SIZE)
        trusted = _trusted()
        self._pools = [
            _Pool(httpx.AsyncHTTPTransport(verify=trusted, limits=limits, trust_env=False))
            for _ in range(max(1, -(-connections // POOL_SIZE)))
        ]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it by the first pool with room, or the emptiest. Raises what httpx raises."""
        has_room = (pool for pool in self._pools if pool.busy < POOL_SIZE)
        pool = next(has_room, None) or min(self._pools, key=lambda each: each.busy)
        pool.busy += 1
        try:
            response = await pool.transport.handle_async_request(request)
        except BaseException:
            pool.busy -= 1
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(pool, response.stream)
        return response

    async def aclose(self) -> None:
        """Close every connection."""
        for pool in self._pools:
            await pool.transport.aclose()
