"""Dialling a node: from a name to an established link, or to a cause that a person understands.

Names are resolved on every dial and all of their addresses are tried under one deadline, each with its share of what is
left. TLS comes from the fleet key; without one (`--insecure-no-auth`) the link is plain TCP. Knows no backoff: that is the
directory's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from superfluid_core.clock import Clock
from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_core.limits import LinkLimits, WireLimits
from superfluid_core.link.addresses import format_address
from superfluid_core.link.causes import why_dial_failed
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.setup import LinkSetup
from superfluid_core.link.tls import (
    SERVER_NAME,
    Credentials,
    PeerError,
    client_context,
    peer_identity,
)
from superfluid_core.wire.messages import Hello, Message, Refuse, Welcome
from superfluid_core.wire.schema import Role

ADDRESSES_MAX = 16


class DialError(SuperfluidError):
    """Raised when no link came about; `cause` says why, to a person, without naming the address."""

    code = ErrorCode.NO_WORKER
    retryable = True

    @property
    def cause(self) -> str:
        return self.message


async def dial(
    host: str,
    port: int,
    *,
    keys: Credentials | None,
    hello: Hello,
    limits: LinkLimits,
    clock: Clock,
) -> Link:
    """Make an established link. Raises DialError within `limits.handshake_ms`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limits.handshake_ms / 1000
    context = None if keys is None else client_context(keys, hello.head)
    setup = LinkSetup(limits, clock, WireLimits())
    failure = DialError("the name has no address")
    try:
        addresses = await _resolve(host, port, deadline_s)
    except (OSError, TimeoutError, UnicodeError) as error:
        words = "timed out" if isinstance(error, TimeoutError) else "no such name"
        raise DialError(f"cannot resolve {host!r}: {words}") from error
    for index, (family, address) in enumerate(addresses):
        share_s = max(0.0, deadline_s - loop.time()) / (len(addresses) - index)
        link = Link(Role.HEAD, setup)
        link.remote = format_address(address[0], address[1])
        try:
            async with asyncio.timeout(share_s):
                return await _establish(link, family, address, context, hello)
        except (OSError, SuperfluidError) as error:
            cause = error if isinstance(error, DialError) else _explain(error, keys)
            if index == 0 or cause.code is not ErrorCode.NO_WORKER:
                failure = cause  # "nothing listens there" tells least
        finally:
            if not link.is_open:
                link.abort("the handshake failed")
    raise failure


def _explain(error: OSError | SuperfluidError, keys: Credentials | None) -> DialError:
    words, code = why_dial_failed(error, keys)
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
    link: Link,
    family: socket.AddressFamily,
    address: tuple[Any, ...],
    context: ssl.SSLContext | None,
    hello: Hello,
) -> Link:
    loop = asyncio.get_running_loop()
    # the protocol is named because asyncio turns Nagle's delays off for sockets that name it
    connected = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        connected.setblocking(False)
        await loop.sock_connect(connected, address)
    except BaseException:
        connected.close()
        raise
    if context is None:
        await loop.create_connection(lambda: link.protocol, sock=connected)
    else:
        await loop.create_connection(
            lambda: link.protocol,
            sock=connected,
            ssl=context,
            server_hostname=SERVER_NAME,
            ssl_shutdown_timeout=1.0,
        )
        link.identity = _identity_of(link, Role.NODE)
    link.send(hello)
    link.establish(_welcome_in(await link.receive(), link.identity))
    return link


def _identity_of(link: Link, role: Role) -> str:
    if link.transport is None or link.close_reason is not None:
        raise LinkClosedError(link.close_reason or "the connection ended")
    return peer_identity(link.transport.get_extra_info("ssl_object"), role)


def _welcome_in(answer: Message, identity: str | None) -> Welcome:
    if isinstance(answer, Refuse):
        raise DialError(
            f"refused: {answer.text or answer.code} ({answer.code})",
            code=answer.code,
            retry_after_ms=answer.retry_after_ms,
        )
    if not isinstance(answer, Welcome):
        raise DialError("it answered HELLO with something else", code=ErrorCode.PROTOCOL_ERROR)
    if identity is not None and answer.node != identity:
        raise PeerError(f"it calls itself {answer.node} and its certificate {identity}")
    return answer
