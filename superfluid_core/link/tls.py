"""TLS 1.3 with both sides authenticated by the fleet key: contexts, leaf certificates, and who the peer is.

A process makes a fresh Ed25519 leaf for every context it makes; the leaf's key exists in memory only. `ssl` can load a
certificate from a path alone, so the path is that of an anonymous memory file (or, where there is none, of a private file
that is removed at once). Only the derived authorities are trusted; names and addresses prove nothing here, so host name
checking is off and `peer_identity` judges instead: version, ALPN, one name of the expected role.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from superfluid_core.errors import ConfigError, ErrorCode, SuperfluidError
from superfluid_core.link.keys import (
    NOT_AFTER,
    NOT_BEFORE,
    FleetKeys,
    keys_from_secrets,
    load_keys,
    write_key_file,
)
from superfluid_core.wire.kinds import IDENTITY
from superfluid_core.wire.schema import Role

__all__ = [
    "ALPN",
    "Credentials",
    "FleetKeys",
    "PeerError",
    "PkiFiles",
    "client_context",
    "keys_from_secrets",
    "load_keys",
    "peer_identity",
    "server_context",
    "write_key_file",
]

ALPN = "superfluid-link/1"
SERVER_NAME = "superfluid-link"
"""What a head sends as the server's name: nothing that could tell fleets or hosts apart."""

_URI = "superfluid://"
_USAGES = {Role.NODE: ExtendedKeyUsageOID.SERVER_AUTH, Role.HEAD: ExtendedKeyUsageOID.CLIENT_AUTH}


class PeerError(SuperfluidError):
    """Raised when TLS succeeded but the peer is not what it has to be; the link is not used."""

    code = ErrorCode.UNAUTHORIZED


@dataclass(frozen=True, slots=True)
class PkiFiles:
    """An operator's own authority instead of a key file: paths of PEM files.

    The certificate carries the one name `superfluid://<role>/<identity>` and the usage of its role, as ours do.
    """

    ca: str
    certificate: str
    key: str

    @property
    def key_id(self) -> str:
        return "own authority"

    @property
    def prefix_salt(self) -> bytes:
        """Nothing that both ends know: each node mints a salt and says it in WELCOME."""
        return b""


Credentials = FleetKeys | PkiFiles


def server_context(keys: Credentials, identity: str) -> ssl.SSLContext:
    """Make the context of a node. Raises ConfigError for an identity outside its alphabet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return _harden(context, keys, Role.NODE, identity)


def client_context(keys: Credentials, identity: str) -> ssl.SSLContext:
    """Make the context of a head. Raises ConfigError for an identity outside its alphabet."""
    return _harden(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), keys, Role.HEAD, identity)


def peer_identity(ssl_object: ssl.SSLObject | ssl.SSLSocket, role: Role) -> str:
    """Who the peer is, having to be of `role`. Raises PeerError."""
    if ssl_object.version() != "TLSv1.3":
        raise PeerError("the peer does not speak TLS 1.3")
    if ssl_object.selected_alpn_protocol() != ALPN:
        raise PeerError(f"the peer does not offer {ALPN}")
    certificate = ssl_object.getpeercert()
    names: Any = (certificate or {}).get("subjectAltName", ())
    if len(names) != 1:
        raise PeerError("the peer's certificate has not exactly one name")
    kind, value = names[0]
    prefix = f"{_URI}{role}/"
    if kind != "URI" or not isinstance(value, str) or not value.startswith(prefix):
        raise PeerError(f"the peer's certificate is not that of a {role}")
    identity = value[len(prefix) :]
    if IDENTITY.fullmatch(identity) is None:
        raise PeerError("the peer's certificate names no acceptable identity")
    return identity


# --- inside ---------------------------------------------------------------------------------------


def _harden(
    context: ssl.SSLContext, keys: Credentials, role: Role, identity: str
) -> ssl.SSLContext:
    if IDENTITY.fullmatch(identity) is None:
        raise ConfigError(f"the identity {identity[:64]!r} has other characters than A-Za-z0-9._-")
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols([ALPN])
    if isinstance(keys, PkiFiles):
        try:
            context.load_verify_locations(cafile=keys.ca)
            context.load_cert_chain(keys.certificate, keys.key)
        except OSError as error:  # TLS's own errors are among them
            raise ConfigError(
                f"cannot use the fleet's certificate files: {error.strerror}"
            ) from None
        return context
    for authority in keys.authorities:
        context.load_verify_locations(cadata=authority.certificate.public_bytes(Encoding.DER))
    with _private_file(_leaf_pem(keys, role, identity)) as path:
        context.load_cert_chain(path)
    return context


def _leaf_pem(keys: FleetKeys, role: Role, identity: str) -> bytes:
    """Make a private key, its certificate and the bridges to older keys, as PEM."""
    key = Ed25519PrivateKey.generate()
    leaf = leaf_certificate(keys, role, identity, key)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for certificate in (leaf, *keys.chain):
        pem += certificate.public_bytes(Encoding.PEM)
    return pem


def leaf_certificate(
    keys: FleetKeys, role: Role, identity: str, key: Ed25519PrivateKey
) -> x509.Certificate:
    """Certify `key` as `identity` in `role`, by the first key of the file."""
    signer, authority = keys.authorities[0].signer, keys.authorities[0].certificate
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([_USAGES[role]]), critical=True)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.UniformResourceIdentifier(f"{_URI}{role}/{identity}")]
            ),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(authority_id, critical=False)
        .sign(signer, None)
    )


@contextmanager
def _private_file(data: bytes) -> Iterator[str]:
    """Offer `data` under a path for as long as the block runs, visible to this user alone."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("superfluid-leaf", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(data)
            yield f"/proc/self/fd/{descriptor}"
        return
    with tempfile.NamedTemporaryFile(mode="wb", prefix="superfluid-", buffering=0) as file:  # 0600
        file.write(data)
        yield file.name
