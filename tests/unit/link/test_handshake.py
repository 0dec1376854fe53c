"""Who gets in, who does not, and what both sides are told about it (reliability.md 3.2)."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from superfluid_core.clock import SystemClock
from superfluid_core.errors import ConfigError, ErrorCode
from superfluid_core.limits import LinkLimits
from superfluid_core.link import tls
from superfluid_core.link.dial import DialError, dial
from superfluid_core.link.keys import FleetKeys, keys_from_secrets
from superfluid_core.wire import codec
from superfluid_core.wire.frames import HEADER
from superfluid_core.wire.messages import Hello, Renew
from superfluid_core.wire.schema import Role
from tests.unit.link.knocks import (
    HELLO,
    NEW,
    NEWEST,
    OLD,
    Refusals,
    cause_of,
    context_with,
    knock,
    stand_in,
)

# --- the good case --------------------------------------------------------------------------------


def test_a_head_with_the_key_gets_a_link_with_names_and_features(
    keys: FleetKeys, make_fleet: Any
) -> None:
    async def main() -> None:
        async with make_fleet(keys).serving() as fleet:
            link = await fleet.dial()
            assert (link.peer, link.identity) == (fleet.answer, "node-1")
            assert link.features == {"embed"}
            (theirs,) = fleet.links
            assert (theirs.peer.head, theirs.identity) == ("head-1", "head-1")
            assert theirs.features == {"embed"}
            assert link.is_open
            assert theirs.is_open
            assert link.remote == f"127.0.0.1:{fleet.port}"
            await link.close("done")

    asyncio.run(main())


def test_ipv6_and_names_work(keys: FleetKeys, make_fleet: Any) -> None:
    async def main() -> None:
        for host in ("::1", "localhost"):
            async with make_fleet(keys).serving(host) as fleet:
                link = await dial(
                    host,
                    fleet.port,
                    keys=keys,
                    hello=HELLO,
                    limits=LinkLimits(),
                    clock=SystemClock(),
                )
                await link.close("done")

    if not socket.has_ipv6:
        return
    asyncio.run(main())


# --- keys and certificates ------------------------------------------------------------------------


def test_another_key_is_named_by_the_head_and_guessed_by_the_node(
    keys: FleetKeys, other_keys: FleetKeys, make_fleet: Any, refusals: Refusals
) -> None:
    async def main() -> DialError:
        async with make_fleet(keys).serving() as fleet:
            return await cause_of(fleet, other_keys)

    error = asyncio.run(main())
    expected = f"refused at the handshake: it trusts another key (ours: key {other_keys.key_id})"
    assert error.cause == expected
    assert error.code is ErrorCode.UNAUTHORIZED
    assert refusals() == ["peer reset during the handshake, usually another key"]


@pytest.mark.slow
def test_a_key_is_rotated_host_by_host_without_a_refused_link(make_fleet: Any) -> None:
    files = [(OLD,), (NEW, OLD), (OLD, NEW), (NEW,), (NEWEST, NEW, OLD)]
    apart = {((OLD,), (NEW,)), ((NEW,), (OLD,))}

    async def main() -> None:
        for node in files:
            async with make_fleet(keys_from_secrets(node)).serving() as fleet:
                for head in files:
                    if (node, head) in apart:
                        await cause_of(fleet, keys_from_secrets(head))
                        continue
                    link = await fleet.dial(keys_from_secrets(head))
                    assert link.is_open
                    await link.close("done")

    asyncio.run(main())


def leaf_of(
    keys: FleetKeys, role: Role, key: Ed25519PrivateKey, **changes: Any
) -> x509.Certificate:
    """A leaf as ours, re-signed with other dates or another name."""
    leaf = tls.leaf_certificate(keys, role, "head-1", key)
    if not changes:
        return leaf
    builder = x509.CertificateBuilder().subject_name(leaf.subject).issuer_name(leaf.issuer)
    builder = builder.public_key(leaf.public_key()).serial_number(leaf.serial_number)
    builder = builder.not_valid_before(changes.get("start", leaf.not_valid_before_utc))
    builder = builder.not_valid_after(changes.get("end", leaf.not_valid_after_utc))
    for extension in leaf.extensions:
        value = extension.value
        if isinstance(value, x509.SubjectAlternativeName) and "names" in changes:
            if not changes["names"]:
                continue
            uris = [x509.UniformResourceIdentifier(name) for name in changes["names"]]
            value = x509.SubjectAlternativeName(uris)
        builder = builder.add_extension(value, extension.critical)
    return builder.sign(keys.authorities[0].signer, None)


def wrong_leaf(
    case: str, key: Ed25519PrivateKey, keys: FleetKeys, other_keys: FleetKeys
) -> x509.Certificate | None:
    """Make the certificate of a head that a node must not accept."""
    self_signed = replace(keys, authorities=(replace(keys.authorities[0], signer=key),))
    changes: dict[str, dict[str, Any]] = {
        "expired": {"end": datetime(2001, 1, 1, tzinfo=UTC)},
        "future": {"start": datetime(2998, 1, 1, tzinfo=UTC)},
        "name of a node": {"names": ["superfluid://node/head-1"]},
        "two names": {"names": ["superfluid://head/a", "superfluid://head/b"]},
        "no name": {"names": []},
        "bad name": {"names": ["superfluid://head/a/b"]},
    }
    if case in changes:
        return leaf_of(keys, Role.HEAD, key, **changes[case])
    others: dict[str, Callable[[], x509.Certificate | None]] = {
        "node's certificate": lambda: leaf_of(keys, Role.NODE, key),
        "none": lambda: None,
        "another key's, our authority trusted": lambda: leaf_of(other_keys, Role.HEAD, key),
        "signed by itself": lambda: leaf_of(self_signed, Role.HEAD, key),
        "the authority itself": lambda: keys.authorities[0].certificate,
    }
    return others[case]()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("node's certificate", "its certificate is not that of a head"),
        ("none", "it shows no certificate"),
        ("another key's, our authority trusted", "its certificate is signed by another key"),
        ("signed by itself", "its certificate is signed by another key"),
        ("expired", "its certificate has expired"),
        ("future", "its certificate is not valid yet"),
        ("name of a node", "the peer's certificate is not that of a head"),
        ("two names", "the peer's certificate has not exactly one name"),
        ("no name", "the peer's certificate has not exactly one name"),
        ("bad name", "the peer's certificate names no acceptable identity"),
        ("the authority itself", ""),
    ],
)
def test_a_head_with_a_wrong_certificate_is_refused_by_name(
    case: str,
    words: str,
    keys: FleetKeys,
    other_keys: FleetKeys,
    make_fleet: Any,
    refusals: Refusals,
) -> None:
    key = (
        keys.authorities[0].signer
        if case.startswith("the authority")
        else Ed25519PrivateKey.generate()
    )
    leaf = wrong_leaf(case, key, keys, other_keys)

    async def main() -> int:
        async with make_fleet(keys).serving() as fleet:
            await knock(fleet.port, context_with(keys, leaf, key), codec.encode(HELLO))
            return len(fleet.links)

    assert asyncio.run(main()) == 0
    assert len(refusals()) == 1
    assert words in refusals()[0]


def own_pki(directory: Path, keys: FleetKeys, role: Role, identity: str) -> tls.PkiFiles:
    """Files as an operator's own authority would issue them."""
    key = Ed25519PrivateKey.generate()
    leaf = tls.leaf_certificate(keys, role, identity, key)
    parts = {
        "ca.pem": keys.authorities[0].certificate.public_bytes(Encoding.PEM),
        f"{role}.pem": leaf.public_bytes(Encoding.PEM),
        f"{role}.key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    for name, data in parts.items():
        (directory / name).write_bytes(data)
    names = ("ca.pem", f"{role}.pem", f"{role}.key")
    return tls.PkiFiles(*(str(directory / name) for name in names))


def test_an_own_authority_works_like_a_key_file(
    keys: FleetKeys, other_keys: FleetKeys, make_fleet: Any, tmp_path: Path
) -> None:
    node, head, stranger = (tmp_path / name for name in ("node", "head", "stranger"))
    for directory in (node, head, stranger):
        directory.mkdir()

    async def main() -> None:
        async with make_fleet(own_pki(node, keys, Role.NODE, "node-1")).serving() as fleet:
            link = await fleet.dial(own_pki(head, keys, Role.HEAD, "head-1"))
            assert link.identity == "node-1"
            await link.close("done")
            error = await cause_of(fleet, own_pki(stranger, other_keys, Role.HEAD, "head-1"))
            assert error.cause.startswith("refused at the handshake: it trusts another key")

    asyncio.run(main())
    (head / "head.key").write_text("broken")
    with pytest.raises(ConfigError, match="cannot use"):
        tls.client_context(
            tls.PkiFiles(*(str(head / n) for n in ("ca.pem", "head.pem", "head.key"))), "h"
        )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("head's certificate", "its certificate is not that of a node"),
        ("name of a head", "the peer's certificate is not that of a node"),
        ("another key", "it trusts another key"),
        ("other ALPN", "does not offer superfluid-link/1"),
        ("TLS 1.2", "closed before WELCOME"),
        ("HTTP", "it answers without TLS"),
        ("no reply", "closed before WELCOME"),
    ],
)
def test_a_node_that_is_none_is_refused_by_name(
    case: str, words: str, keys: FleetKeys, other_keys: FleetKeys
) -> None:
    key = Ed25519PrivateKey.generate()
    names = {"head's certificate": Role.HEAD}
    leaf = leaf_of(other_keys if case == "another key" else keys, names.get(case, Role.NODE), key)
    if case == "name of a head":
        leaf = leaf_of(keys, Role.NODE, key, names=["superfluid://head/head-1"])
    context = context_with(keys, leaf, key, server=True)
    if case == "other ALPN":
        context.set_alpn_protocols(["h2"])
    if case == "TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    is_plain = case in ("HTTP", "no reply")
    reply = b"HTTP/1.1 400 Bad Request\r\n\r\n" if case == "HTTP" else b""

    async def main() -> DialError:
        server, port = await stand_in(None if is_plain else context, reply)
        async with server:
            with pytest.raises(DialError) as caught:
                await dial(
                    "127.0.0.1",
                    port,
                    keys=keys,
                    hello=HELLO,
                    limits=LinkLimits(),
                    clock=SystemClock(),
                )
            await asyncio.sleep(0.02)
            return caught.value

    assert words in asyncio.run(main()).cause


def test_older_tls_and_other_protocols_are_refused_by_the_node(
    keys: FleetKeys, make_fleet: Any, refusals: Refusals
) -> None:
    key = Ed25519PrivateKey.generate()
    leaf = leaf_of(keys, Role.HEAD, key)
    older, other, silent = (context_with(keys, leaf, key) for _ in range(3))
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    other.set_alpn_protocols(["h2"])
    silent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    async def main() -> None:
        for context, words in (
            (older, "does not speak TLS 1.3"),
            (other, "does not offer superfluid-link/1"),
            (silent, ""),
        ):
            async with make_fleet(keys).serving() as fleet:
                await knock(fleet.port, context, codec.encode(HELLO))
                assert words in refusals()[-1]
                assert fleet.links == []

    asyncio.run(main())


def test_the_wall_clock_does_not_matter(keys: FleetKeys) -> None:
    leaf = tls.leaf_certificate(keys, Role.NODE, "n", Ed25519PrivateKey.generate())
    for certificate in (leaf, *(authority.certificate for authority in keys.authorities)):
        assert certificate.not_valid_before_utc <= datetime(1990, 1, 1, tzinfo=UTC)
        assert certificate.not_valid_after_utc >= datetime(2099, 12, 31, tzinfo=UTC)


def test_contexts_accept_only_good_identities(keys: FleetKeys) -> None:
    for identity in ("", "a b", "a/b", "x" * 65, "é"):
        with pytest.raises(ConfigError):
            tls.server_context(keys, identity)
    context = tls.server_context(keys, "x" * 64)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.num_tickets == 0


def test_where_there_are_no_memory_files_a_private_one_is_used(
    keys: FleetKeys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert tls.server_context(keys, "n").cert_store_stats()["x509_ca"] == 1
    assert list(tmp_path.glob("superfluid-*")) == []


def test_a_later_minor_and_features_that_nobody_knows_are_negotiated_away(
    keys: FleetKeys, make_fleet: Any
) -> None:
    """What N and N-1 say to each other: the lower minor, the features of both; optional frames of a later one are skipped."""
    later = Hello(255, ("embed", "of-a-later-minor", "conns-4"), "head-1")
    optional = HEADER.pack(5, 0x80, 0, 2, 77) + b"\xc1\xc1abc"

    async def main() -> None:
        async with make_fleet(keys).serving() as fleet:
            link = await dial(
                "127.0.0.1",
                fleet.port,
                keys=keys,
                hello=later,
                limits=LinkLimits(),
                clock=SystemClock(),
            )
            (theirs,) = fleet.links
            for end in (link, theirs):
                assert (end.minor, end.features) == (0, {"embed"})
            assert link.transport is not None
            link.transport.write(optional + codec.encode(Renew(7)) + optional)
            assert await theirs.receive() == Renew(7)
            assert theirs.is_open
            await link.close("done")

    asyncio.run(main())


# --- without a key --------------------------------------------------------------------------------


def test_insecure_ends_understand_each_other(make_fleet: Any) -> None:
    async def main() -> None:
        async with make_fleet(None).serving() as fleet:
            link = await fleet.dial()
            assert link.identity is None
            assert link.features == {"embed"}
            await link.close("done")

    asyncio.run(main())


def test_one_end_with_and_one_without_a_key_both_say_so(
    keys: FleetKeys, make_fleet: Any, refusals: Refusals
) -> None:
    async def main() -> None:
        async with make_fleet(None).serving() as fleet:
            error = await cause_of(fleet, keys)
            assert "it runs without a key" in error.cause
            assert refusals()[-1].endswith(
                "it speaks TLS: it has a fleet key, and this end has none"
            )
        async with make_fleet(keys).serving() as fleet:
            with pytest.raises(DialError, match="it may want a fleet key, and this head has none"):
                await dial(
                    "127.0.0.1",
                    fleet.port,
                    keys=None,
                    hello=HELLO,
                    limits=LinkLimits(),
                    clock=SystemClock(),
                )
            await asyncio.sleep(0.05)
            assert "it does not speak TLS" in refusals()[-1]

    asyncio.run(main())
