"""An operator's own authority instead of a key file: `--fleet-ca --fleet-cert --fleet-cert-key`, judged at start.

What a certificate must be for this fleet is read from the file itself, so that a wrong one is refused here by name and not at
every handshake: one name `superfluid://<role>/<identity>`, the usage of its role, a private key that nobody else can read. A
process is called what its certificate says. Knows no TLS: the contexts are `tls.py`'s.
"""

from __future__ import annotations

import stat
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from superfluid_core.errors import ConfigError
from superfluid_core.limits import LinkLimits
from superfluid_core.link.tls import PkiFiles
from superfluid_core.wire.kinds import IDENTITY
from superfluid_core.wire.schema import Role

FLAGS = ("--fleet-ca", "--fleet-cert", "--fleet-cert-key")

_USAGES = {
    Role.NODE: (ExtendedKeyUsageOID.SERVER_AUTH, "serverAuth"),
    Role.HEAD: (ExtendedKeyUsageOID.CLIENT_AUTH, "clientAuth"),
}


def pki_files(ca: str | None, certificate: str | None, key: str | None) -> PkiFiles | None:
    """Take the three settings, all or none. Raises ConfigError."""
    if ca and certificate and key:
        return PkiFiles(ca, certificate, key)
    given = (ca, certificate, key)
    missing = [flag for flag, value in zip(FLAGS, given, strict=True) if not value]
    if len(missing) == len(FLAGS):
        return None
    raise ConfigError(f"{missing[0]} is missing: an own authority needs {', '.join(FLAGS)}")


def identity_in(files: PkiFiles, role: Role) -> str:
    """Judge the files and return the identity that the certificate gives. Raises ConfigError."""
    _read(FLAGS[0], files.ca)
    _judge_key(files.key)
    try:
        leaf = x509.load_pem_x509_certificate(_read(FLAGS[1], files.certificate))
    except ValueError:
        raise ConfigError(f"{FLAGS[1]} {files.certificate}: no PEM certificate in it") from None
    where = f"{FLAGS[1]} {files.certificate}"
    _judge_usage(leaf, role, where)
    return _identity(leaf, role, where)


def _identity(leaf: x509.Certificate, role: Role, where: str) -> str:
    prefix = f"superfluid://{role}/"
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ConfigError(f"{where}: it has no name; it needs {prefix}<identity>") from None
    found = list(names)
    if len(found) != 1 or not isinstance(found[0], x509.UniformResourceIdentifier):
        raise ConfigError(f"{where}: it needs exactly one name, the URI {prefix}<identity>")
    name = found[0].value
    if not name.startswith(prefix):
        raise ConfigError(f"{where}: its name is {name[:100]!r}, not {prefix}<identity>")
    identity = name[len(prefix) :]
    if IDENTITY.fullmatch(identity) is None:
        raise ConfigError(f"{where}: the identity {identity[:64]!r} is not 1..64 of A-Za-z0-9._-")
    return identity


def _judge_usage(leaf: x509.Certificate, role: Role, where: str) -> None:
    usage, name = _USAGES[role]
    try:
        usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        raise ConfigError(f"{where}: it has no extended key usage; it needs {name}") from None
    if usage not in usages:
        raise ConfigError(f"{where}: its extended key usage lacks {name}: it is no {role}'s")


def _judge_key(path: str) -> None:
    try:
        facts = Path(path).stat()
    except OSError as error:
        raise ConfigError(f"{FLAGS[2]} {path}: {error.strerror}") from None
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"{FLAGS[2]} {path}: not a regular file")
    if facts.st_mode & 0o006:
        mode = stat.S_IMODE(facts.st_mode)
        raise ConfigError(f"{FLAGS[2]} {path}: open to everybody (mode {mode:04o})")


def _read(flag: str, path: str) -> bytes:
    bytes_max = LinkLimits().pki_file_bytes_max
    try:
        with Path(path).open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if len(data) > bytes_max:
        raise ConfigError(f"{flag} {path}: larger than {bytes_max} bytes")
    return data
