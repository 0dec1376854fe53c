"""Dialling out: from a name to an established link, or to a cause that a person understands.

`dial` is the head's (it dials nodes), `join` the node's (it dials a head that listens for nodes); what they do once connected is
`shake.py`'s. Names are resolved on every dial and all of their addresses are tried under one deadline, each with its share of
what is left. Without keys (`--insecure-no-auth`) the link is plain TCP. Knows no backoff: that is the caller's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from superfluid_core.clock import Clock
from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_core.limits import LinkLimits, WireLimits
from superfluid_core.link.addresses import format_address
from superfluid_core.link.causes import Stage, why_dial_failed, why_join_failed, why_unresolved
from superfluid_core.link.link import Link
from superfluid_core.link.setup import LinkSetup
from superfluid_core.link.shake import HeadShake, RefusedError, Shake
from superfluid_core.link.tls import Credentials, client_context
from superfluid_core.wire.messages import Hello

ADDRESSES_MAX = 16


class DialError(SuperfluidError):
    """Raised when no link came about; `cause` says why, to a person, without naming the address."""

    code = ErrorCode.NO_WORKER
    retryable = True

    @property
    def cause(self) -> str:
        return self.message


Explain = Callable[[BaseException, Stage], tuple[str, ErrorCode]]


@dataclass(frozen=True, slots=True)
class _Caller:
    """Who dials: its part of the handshake, what its links have in common, its words for a failure."""

    shake: Shake
    setup: LinkSetup
    explain: Explain


async def dial(
    host: str,
    port: int,
    *,
    keys: Credentials | None,
    hello: Hello,
    limits: LinkLimits,
    clock: Clock,
) -> Link:
    """Make an established link to a node. Raises DialError within `limits.handshake_ms`."""
    context = None if keys is None else client_context(keys, hello.head)
    caller = _Caller(
        HeadShake(context, hello),
        LinkSetup(limits, clock, WireLimits()),
        lambda error, stage: why_dial_failed(error, keys, stage),
    )
    return await _reach(host, port, caller)


async def join(host: str, port: int, shake: Shake, setup: LinkSetup) -> Link:
    """Make an established link to a head that listens for nodes. Raises DialError within `handshake_ms`."""
    has_key = shake.context is not None
    caller = _Caller(
        shake, setup, lambda error, stage: why_join_failed(error, stage, has_key=has_key)
    )
    return await _reach(host, port, caller)


async def _reach(host: str, port: int, caller: _Caller) -> Link:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + caller.setup.limits.handshake_ms / 1000
    failure = DialError("the name has no address")
    try:
        addresses = await _resolve(host, port, deadline_s)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise DialError(f"cannot resolve {host!r}: {why_unresolved(error)}") from error
    for index, (family, address) in enumerate(addresses):
        share_s = max(0.0, deadline_s - loop.time()) / (len(addresses) - index)
        link = Link(caller.shake.role, caller.setup)
        link.remote = format_address(address[0], address[1])
        try:
            async with asyncio.timeout(share_s):
                return await _establish(link, family, address, caller)
        except (OSError, SuperfluidError) as error:
            cause = _failure_of(error, caller)
            if index == 0 or cause.code is not ErrorCode.NO_WORKER:
                failure = cause  # "nothing listens there" tells least
        finally:
            if not link.is_open:
                link.abort("the handshake failed")
    raise failure


def _failure_of(error: OSError | SuperfluidError, caller: _Caller) -> DialError:
    """Put an error into words. A TimeoutError here is the deadline's."""
    if isinstance(error, DialError):
        return error
    if isinstance(error, RefusedError):
        return DialError(error.message, code=error.code, retry_after_ms=error.retry_after_ms)
    words, code = caller.explain(error, Stage.HANDSHAKE)
    return DialError(words, code=code)


async def _resolve(
    host: str, port: int, deadline_s: float
) -> Sequence[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout_at(deadline_s):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [(family, tuple(where)) for family, _, _, _, where in found]
    return list(dict.fromkeys(addresses))[:ADDRESSES_MAX]


async def _establish(
    link: Link, family: socket.AddressFamily, address: tuple[Any, ...], caller: _Caller
) -> Link:
    loop = asyncio.get_running_loop()
    # the protocol is named because asyncio turns Nagle's delays off for sockets that name it
    connected = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        connected.setblocking(False)
        await loop.sock_connect(connected, address)
    except OSError as error:
        connected.close()
        words, code = caller.explain(error, Stage.CONNECT)
        raise DialError(words, code=code) from error
    except BaseException:
        connected.close()
        raise
    await caller.shake.shake(link, connected)
    return link
