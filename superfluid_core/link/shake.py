"""The handshake of a link over a connected socket: for either end, whoever dialled.

The node is always the TLS server and answers HELLO, the head is always the TLS client and says it: on a socket that the node
dialled too. Both leave an established link behind or raise OSError (TLS's errors are among them) or SuperfluidError; what that
means in words is `causes.py`'s. Knows no names, no addresses and no backoff; the socket is the link's from here on.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.tls import SERVER_NAME, PeerError, peer_identity
from superfluid_core.wire.messages import Hello, Message, Refuse, Welcome
from superfluid_core.wire.schema import Role

TLS_SHUTDOWN_S = 1.0


class RefusedError(SuperfluidError):
    """Raised at the head: the node answered HELLO with a no; the code is the node's."""

    code = ErrorCode.NO_WORKER
    retryable = True


class Shake(Protocol):
    """One end's part."""

    @property
    def role(self) -> Role: ...

    @property
    def context(self) -> ssl.SSLContext | None: ...

    async def shake(self, link: Link, connected: socket.socket) -> None: ...


@dataclass(frozen=True, slots=True)
class HeadShake:
    """The head's part. The caller bounds its time."""

    context: ssl.SSLContext | None
    hello: Hello
    role: Role = Role.HEAD

    async def shake(self, link: Link, connected: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self.context is None:
            await loop.create_connection(lambda: link.protocol, sock=connected)
        else:
            await loop.create_connection(
                lambda: link.protocol,
                sock=connected,
                ssl=self.context,
                server_hostname=SERVER_NAME,
                ssl_shutdown_timeout=TLS_SHUTDOWN_S,
            )
            link.identity = _identity_of(link, Role.NODE)
        link.send(self.hello)
        link.establish(_welcome_in(await link.receive(), link.identity))


@dataclass(frozen=True, slots=True)
class NodeShake:
    """The node's part, from the connected socket to WELCOME within `seconds`."""

    context: ssl.SSLContext | None
    answer: Callable[[Hello], Welcome | Refuse]
    seconds: float
    role: Role = Role.NODE

    async def shake(self, link: Link, connected: socket.socket) -> None:
        async with asyncio.timeout(self.seconds):
            hello = await self._hear(link, connected)
            answer = self._judge(hello, link)
            link.send(answer)
        if isinstance(answer, Refuse):
            await link.close(answer.text)
            raise PeerError(f"answered HELLO with REFUSE: {answer.text} ({answer.code})")
        link.establish(hello)

    async def _hear(self, link: Link, connected: socket.socket) -> Hello:
        loop = asyncio.get_running_loop()
        if self.context is None:
            await loop.connect_accepted_socket(lambda: link.protocol, connected)
        else:
            await loop.connect_accepted_socket(
                lambda: link.protocol,
                connected,
                ssl=self.context,
                ssl_handshake_timeout=2 * self.seconds,  # ours strikes first
                ssl_shutdown_timeout=TLS_SHUTDOWN_S,
            )
            link.identity = _identity_of(link, Role.HEAD)
        hello = await link.receive()
        assert isinstance(hello, Hello), "the connection lets nothing else through"
        return hello

    def _judge(self, hello: Hello, link: Link) -> Welcome | Refuse:
        if link.identity is not None and hello.head != link.identity:
            return Refuse(ErrorCode.UNAUTHORIZED, "the head's name is not its certificate's")
        return self.answer(hello)


def _identity_of(link: Link, role: Role) -> str:
    if link.transport is None or link.close_reason is not None:
        raise LinkClosedError(link.close_reason or "the connection ended")
    return peer_identity(link.transport.get_extra_info("ssl_object"), role)


def _welcome_in(answer: Message, identity: str | None) -> Welcome:
    if isinstance(answer, Refuse):
        raise RefusedError(
            f"refused: {answer.text or answer.code} ({answer.code})",
            code=answer.code,
            retry_after_ms=answer.retry_after_ms,
        )
    if not isinstance(answer, Welcome):
        raise PeerError("it answered HELLO with something else", code=ErrorCode.PROTOCOL_ERROR)
    if identity is not None and answer.node != identity:
        raise PeerError(f"it calls itself {answer.node} and its certificate {identity}")
    return answer
