"""Who is asking: API keys as SHA-256 digests, compared in constant time over all of them.

Owns the secrets' digests and the `Principal` that a key stands for; tenants are principals' names. The secrets
themselves are hashed on the way in and forgotten. A ring can be given other keys while it is in use: what is asked next is
judged by those, what was let in stays. Knows header values, not HTTP frameworks.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
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
    `models` are those it may use, None for all. `weight` is its share in fair queueing. Limits of 0 are none.
    """

    name: str
    admin: bool = False
    qos: QosClass | None = None
    max_qos: QosClass | None = None
    batch_invariant: bool = False
    models: frozenset[str] | None = None
    weight: int = 1
    rate_limit_rpm: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0

    @property
    def is_named(self) -> bool:
        """It has a key of its own."""
        return self.name != ANONYMOUS_NAME

    def shared_by(self, heads: int) -> Principal:
        """Return what it may at one of `heads` heads: its share of every rate, at least one."""
        return replace(
            self,
            rate_limit_rpm=share_of(self.rate_limit_rpm, heads),
            tokens_per_minute=share_of(self.tokens_per_minute, heads),
        )

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


def share_of(rate: int, heads: int) -> int:
    """Divide a rate, rounded up: 0 is none and stays so."""
    return -(-rate // heads)


ANONYMOUS_NAME = "anonymous"
ANONYMOUS = Principal(ANONYMOUS_NAME, admin=True)
GLOBAL_KEY_NAME = "default"

CALLER: ContextVar[Principal | None] = ContextVar("caller", default=None)
"""Who is being answered, set by the gate alone. Read where forgetting to pass the caller on would let it see too much: a model that
is not its own stays out of its sight on every route, also on those that nobody has written yet. None is the head itself."""


class KeyRing:
    """The configured keys. Empty means that no key is needed."""

    __slots__ = ("_digests",)

    def __init__(
        self,
        secrets: Iterable[tuple[str, Principal]] = (),
        digests: Iterable[tuple[bytes, Principal]] = (),
    ) -> None:
        found = [(digest_of(secret.encode()), principal) for secret, principal in secrets]
        found += digests
        if len(found) > KEYS_MAX:
            raise ConfigError(f"more than {KEYS_MAX} API keys")
        if len({digest for digest, _ in found}) != len(found):
            raise ConfigError("two API keys are equal")
        self._digests = tuple(found)

    def __repr__(self) -> str:
        return f"KeyRing({len(self._digests)} keys)"

    @property
    def is_empty(self) -> bool:
        return not self._digests

    @property
    def names(self) -> frozenset[str]:
        return frozenset(principal.name for _, principal in self._digests)

    def adopt(self, other: KeyRing) -> None:
        """Hold the keys of `other` from now on. It must hold some if this one does: a lock is never taken away."""
        assert self.is_empty or not other.is_empty, "keys were replaced by none"
        self._digests = other._digests

    def shared_by(self, heads: int) -> KeyRing:
        """Return the ring of one of `heads` heads, which has its share of every rate."""
        shares = [(digest, principal.shared_by(heads)) for digest, principal in self._digests]
        return KeyRing(digests=shares)

    def find(self, secret: bytes) -> Principal | None:
        """Return the principal of a key; looks at every key, whichever matches."""
        given = digest_of(secret)
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


def digest_of(secret: bytes) -> bytes:
    """Hash a key as `key_sha256` of a policy does."""
    return hashlib.sha256(secret).digest()


def has_secret(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether raw request headers hold a key, right or wrong."""
    return any(_secret(name.lower(), value) for name, value in headers)


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
