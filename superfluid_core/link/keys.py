"""The fleet key: its file, and everything that is derived from it.

A key file has one or more lines `fk1:<base64url of 32 bytes or more>`; the first signs, all are trusted. HKDF-SHA256 makes
from each, under separate labels: the Ed25519 seed, name and serial of a certificate authority, the id that logs show, the
salt of the prefix cache and the key of hashes in logs. The key itself never reaches an argument, the environment, a log
line or a repr. A CA certificate made here has the same bytes on every machine.
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
import secrets
import stat
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from superfluid_core.errors import ConfigError
from superfluid_core.limits import LinkLimits

PREFIX = "fk1:"
KEY_BYTES_MIN = 32
KEYS_MAX = 8
NOT_BEFORE = datetime(1970, 1, 1, tzinfo=UTC)
NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""A machine whose wall clock is wrong must still be able to link, also one that starts at the beginning of time."""

_SALT = b"superfluid-link/1"


def derive(key: bytes, label: str, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, _SALT, label.encode()).derive(key)


@dataclass(frozen=True, slots=True)
class Authority:
    """The certificate authority that one key is."""

    signer: Ed25519PrivateKey = field(repr=False)
    certificate: x509.Certificate = field(repr=False)


@dataclass(frozen=True, slots=True)
class FleetKeys:
    """What a process needs of its key file. The keys themselves are gone once this is made."""

    key_id: str
    key_ids: tuple[str, ...]
    prefix_salt: bytes = field(repr=False)
    log_key: bytes = field(repr=False)
    authorities: tuple[Authority, ...] = field(repr=False)

    @property
    def chain(self) -> tuple[x509.Certificate, ...]:
        """Bridges that let a peer which trusts only a later key of the file verify what the first one signed.

        Each key signs the authority before it, so a fleet is rotated host by host without a refused link.
        """
        pairs = zip(self.authorities, self.authorities[1:], strict=False)
        return tuple(_bridge(newer, older) for newer, older in pairs)


def keys_from_secrets(keys: tuple[bytes, ...]) -> FleetKeys:
    """Derive everything; the first key signs."""
    ids = tuple(derive(key, "key id", 4).hex() for key in keys)
    return FleetKeys(
        key_id=ids[0],
        key_ids=ids,
        prefix_salt=derive(keys[0], "prefix cache salt", 32),
        log_key=derive(keys[0], "log hash key", 32),
        authorities=tuple(_authority(key) for key in keys),
    )


def load_keys(path: str | Path) -> FleetKeys:
    """Read a key file by the rules above. Raises ConfigError, which never quotes the content."""
    return keys_from_secrets(_parse(_read(Path(path)), Path(path)))


def write_key_file(path: str | Path) -> FleetKeys:
    """Make a new key file, mode 0600, only where nothing is yet. Raises ConfigError."""
    key = secrets.token_bytes(KEY_BYTES_MIN)
    line = f"{PREFIX}{base64.urlsafe_b64encode(key).decode().rstrip('=')}\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; a key file is never overwritten") from None
    except OSError as error:
        raise ConfigError(f"cannot write the key file {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())
    return keys_from_secrets((key,))


# --- reading --------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    bytes_max = LinkLimits().key_file_bytes_max
    try:
        # non-blocking, so that a FIFO cannot hold the start up; symbolic links are followed (secret mounts use them)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        words = "a loop of links" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(f"cannot read the key file {path}: {words}") from None
    try:
        _judge_file(os.fstat(descriptor), path)
        data = b""
        while len(data) <= bytes_max and (piece := os.read(descriptor, bytes_max + 1)):
            data += piece
    finally:
        os.close(descriptor)
    if len(data) > bytes_max:
        raise ConfigError(f"the key file {path} is larger than {bytes_max} bytes")
    return data


def _judge_file(facts: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"the key file {path} is not a regular file")
    if facts.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"the key file {path} belongs to another user (uid {facts.st_uid})")
    if facts.st_mode & 0o006:
        mode = stat.S_IMODE(facts.st_mode)
        raise ConfigError(f"the key file {path} is open to everybody (mode {mode:04o})")


def _parse(data: bytes, path: Path) -> tuple[bytes, ...]:
    """Split into keys. A byte order mark, CRLF, blank lines and lines that begin with # are harmless."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"the key file {path} is not text") from None
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not lines:
        raise ConfigError(f"the key file {path} holds no key")
    if len(lines) > KEYS_MAX:
        raise ConfigError(f"the key file {path} holds more than {KEYS_MAX} keys")
    keys = tuple(_key_of(line, f"line {number} of the key file {path}") for number, line in lines)
    if len(set(keys)) != len(keys):
        raise ConfigError(f"the key file {path} holds a key twice")
    return keys


def _key_of(line: str, where: str) -> bytes:
    if not line.startswith(PREFIX):
        raise ConfigError(f"{where} does not begin with {PREFIX}")
    coded = line[len(PREFIX) :].rstrip("=")
    try:
        key = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(f"{where} is not base64url") from None
    if len(key) < KEY_BYTES_MIN:
        raise ConfigError(f"{where} has {len(key)} bytes of key; at least {KEY_BYTES_MIN}")
    return key


# --- certificates of authorities ------------------------------------------------------------------


def _authority(key: bytes) -> Authority:
    signer = Ed25519PrivateKey.from_private_bytes(derive(key, "authority seed", 32))
    name = x509.Name(
        [
            x509.NameAttribute(
                NameOID.COMMON_NAME, f"superfluid fleet {derive(key, 'authority name', 8).hex()}"
            )
        ]
    )
    serial = _serial(derive(key, "authority serial", 16))
    return Authority(signer, _certify(name, signer.public_key(), name, signer, serial))


def _bridge(newer: Authority, older: Authority) -> x509.Certificate:
    """Certify the newer authority by the older one."""
    subject, issuer = newer.certificate, older.certificate
    digest = hashes.Hash(hashes.SHA256())
    digest.update(subject.fingerprint(hashes.SHA256()) + issuer.fingerprint(hashes.SHA256()))
    serial = _serial(digest.finalize()[:16])
    key = newer.signer.public_key()
    return _certify(subject.subject, key, issuer.subject, older.signer, serial)


def _serial(data: bytes) -> int:
    return int.from_bytes(data, "big") >> 1 | 1  # positive, as certificates want it


def _certify(
    subject: x509.Name,
    key: Ed25519PublicKey,
    issuer: x509.Name,
    signer: Ed25519PrivateKey,
    serial: int,
) -> x509.Certificate:
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(authority_id, critical=False)
        .sign(signer, None)
    )
