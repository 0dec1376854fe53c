"""Many connections of one client, in several small pools.

A pool of httpx looks at every one of its connections whenever a request begins or ends: two hundred streams that end together
took the client the better part of a second, in which it read nothing, and the pause looked like the server's. Requests are dealt
out in turn over pools of `POOL_SIZE`; each keeps its connections alive as before.
"""

from __future__ import annotations

import ssl

import httpx

POOL_SIZE = 16


class Pools(httpx.AsyncBaseTransport):
    """A transport of up to `connections` connections, dealt out over pools in turn."""

    def __init__(self, connections: int) -> None:
        count = max(1, -(-connections // POOL_SIZE))
        size = -(-connections // count)
        limits = httpx.Limits(max_connections=size, max_keepalive_connections=size)
        trusted = ssl.create_default_context()
        self._pools = [
            httpx.AsyncHTTPTransport(verify=trusted, limits=limits, trust_env=False)
            for _ in range(count)
        ]
        self._next = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it by the pool whose turn it is. Raises what httpx raises."""
        pool = self._pools[self._next]
        self._next = (self._next + 1) % len(self._pools)
        return await pool.handle_async_request(request)

    async def aclose(self) -> None:
        """Close every connection."""
        for pool in self._pools:
            await pool.aclose()
