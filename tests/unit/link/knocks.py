"""Ways to knock at a node that no head of ours would try, shared by the handshake tests."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from superfluid_core.link import tls
from superfluid_core.link.dial import DialError
from superfluid_core.link.keys import FleetKeys
from superfluid_core.wire.messages import Hello

HELLO = Hello(0, ("embed",), "head-1")
OLD, NEW, NEWEST = (bytes([number]) * 32 for number in (1, 2, 3))
Refusals = Callable[[], list[str]]


async def cause_of(fleet: Any, keys: tls.Credentials | None = None, **changes: Any) -> DialError:
    """The error of a dial that has to fail; waits until the node has logged its side."""
    with pytest.raises(DialError) as caught:
        await fleet.dial(keys, **changes)
    await asyncio.sleep(0.05)
    return caught.value


def context_with(
    keys: FleetKeys, leaf: x509.Certificate | None, key: Ed25519PrivateKey, *, server: bool = False
) -> ssl.SSLContext:
    """A context like ours, but with any leaf, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([tls.ALPN])
    for authority in keys.authorities:
        context.load_verify_locations(cadata=authority.certificate.public_bytes(Encoding.DER))
    if leaf is not None:
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        with tls._private_file(pem + leaf.public_bytes(Encoding.PEM)) as path:
            context.load_cert_chain(path)
    return context


async def knock(port: int, context: ssl.SSLContext | None, data: bytes, wait_s: float = 3) -> bytes:
    """Connect like no head of ours, send, and return what comes until the end."""
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="x" if context else None
        )
    except OSError as error:
        return repr(error).encode()
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), wait_s)
    except OSError as error:
        return repr(error).encode()
    finally:
        writer.transport.abort()
        await asyncio.sleep(0.02)


async def stand_in(
    context: ssl.SSLContext | None, reply: bytes = b"", patience: int = 1
) -> tuple[Any, int]:
    """A server that is no node of ours; it leaves when it has read `patience` bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readexactly(patience)
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    return server, server.sockets[0].getsockname()[1]
