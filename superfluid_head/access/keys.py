"""Who is asking: API keys as SHA-256 digests, compared in constant time over all of them.

Owns the secrets' digests and the `Principal` that a key stands for; tenants are principals' names. The secrets
themselves are hashed on the way in and forgotten. Knows header values, not HTTP frameworks.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from superfluid_core.errors import ConfigError
from superfluid_core.session import QosClass

KEY_FILE_BYTES_MAX = 64 * 1024
KEY_CHARS_MIN = 8
KEYS_MAX = 1_024


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. `name` is the tenant in fairness, logs and metrics.

    `qos` is the class of its requests, None for the head's default; `max_qos` the best that it may ask for, None for any.
    """

    name: str
    admin: bool = False
    qos: QosClass | None = None
    max_qos: QosClass | None = None
    batch_invariant: bool = False

    @property
    def is_named(self) -> bool:
        """It has a key of its own."""
        return self.name != ANONYMOUS_NAME


ANONYMOUS_NAME = "anonymous"
ANONYMOUS = Principal(ANONYMOUS_NAME, admin=True)
GLOBAL_KEY_NAME = "default"


class KeyRing:
    """The configured keys. Empty means that no key is needed."""

    __slots__ = ("_digests",)

    def __init__(self, secrets: Iterable[tuple[str, Principal]] = ()) -> None:
        digests = [(_digest(secret.encode()), principal) for secret, principal in secrets]
        if len(digests) > KEYS_MAX:
            raise ConfigError(f"more than {KEYS_MAX} API keys")
        if len({digest for digest, _ in digests}) != len(digests):
            raise ConfigError("two API keys are equal")
        self._digests = tuple(digests)

    def __repr__(self) -> str:
        return f"KeyRing({len(self._digests)} keys)"

    @property
    def is_empty(self) -> bool:
        return not self._digests

    def find(self, secret: bytes) -> Principal | None:
        """Return the principal of a key; looks at every key, whichever matches."""
        given = _digest(secret)
        found: Principal | None = None
        for digest, principal in self._digests:
            if hmac.compare_digest(given, digest):
                found = principal
        return found

    def judge(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal | None:
        """Return the caller behind raw request headers; None means 401."""
        if self.is_empty:
            return ANONYMOUS
        for name, value in headers:
            secret = _secret(name.lower(), value)
            if secret is not None:
                found = self.find(secret)
                if found is not None:
                    return found
        return None


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(b"superfluid api key\0" + secret).digest()


def _secret(name: bytes, value: bytes) -> bytes | None:
    """Return the key in an `Authorization: Bearer` or `x-api-key` header."""
    if name == b"x-api-key":
        return value.strip()
    if name == b"authorization":
        scheme, _, rest = value.strip().partition(b" ")
        if scheme.lower() == b"bearer" and rest.strip():
            return rest.strip()
    return None


def read_key_file(path: Path) -> str:
    """Read the key in a file of one line. Raises ConfigError that never shows the content."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"API key file {path}: not a regular file")
        with path.open("rb") as file:
            data = file.read(KEY_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"API key file {path}: {error.strerror}") from None
    if status.st_mode & stat.S_IRWXO:
        raise ConfigError(f"API key file {path}: readable by everyone (chmod 640 or less)")
    return check_key(data.decode("utf-8", "replace").strip().lstrip("\ufeff"), f"file {path}")


def check_key(secret: str, where: str) -> str:
    """Refuse keys that cannot be sent in a header or are too short to be meant."""
    if len(secret) < KEY_CHARS_MIN or not secret.isascii() or not secret.isprintable():
        raise ConfigError(
            f"API key from {where}: needs at least {KEY_CHARS_MIN} visible ASCII characters, no spaces"
        )
    if " " in secret or len(secret) > 512:
        raise ConfigError(f"API key from {where}: holds a space or more than 512 characters")
    return secret
