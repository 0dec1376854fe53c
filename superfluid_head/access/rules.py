"""The settings of the door: limits per address, proxies, origins, the certificate, and where keys come from.

One table of options and the frozen values made of it. `config.py` merges and calls; nothing here reads the environment but what
it is handed.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superfluid_core.errors import ConfigError
from superfluid_core.options import Option, integer
from superfluid_head.access.addresses import Network, parse_network
from superfluid_head.access.certificate import Certificate
from superfluid_head.access.keys import (
    GLOBAL_KEY_NAME,
    KEYS_MAX,
    KeyRing,
    Principal,
    check_key,
    digest_of,
    read_key_file,
    share_of,
)
from superfluid_head.access.origins import parse_origin
from superfluid_head.access.policy import read_policy

CONNS_PER_ADDRESS = 64

ACCESS_OPTIONS: tuple[Option, ...] = (
    Option("api-key", "API key of clients; SUPERFLUID_API_KEY or the configuration file only.", secret=True),
    Option("api-key-file", "File that holds the API key of clients.", metavar="FILE"),
    Option("key-policy", "Named keys and what each may do, read again on SIGHUP.", metavar="FILE.json"),
    Option("rate-limit", "Requests a minute of one client address; 0 is no limit.", integer(0, 1_000_000), 0, metavar="RPM"),
    Option("trusted-proxy", "Networks whose X-Forwarded-For counts, separated by commas or repeated.", parse_network,
           metavar="CIDR", repeated=True),
    Option("conns-per-address", "Connections of one client address; 0 is no limit.", integer(0, 4_096), CONNS_PER_ADDRESS,
           metavar="N"),
    Option("cors-origin", "Web pages that may ask, repeatable: https://app.example, or * for all.", parse_origin,
           metavar="ORIGIN", repeated=True),
    Option("tls-cert", "Certificate chain for HTTPS, read again on SIGHUP.", metavar="FILE.pem"),
    Option("tls-key", "Its private key.", metavar="FILE.pem"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeySources:
    """Where keys come from; all of it can be read again. `secret` is what the environment or the settings gave, `heads` how many share rates."""

    secret: str | None = field(default=None, repr=False)
    file: Path | None = None
    policy: Path | None = None
    heads: int = 1

    @property
    def can_change(self) -> bool:
        return self.file is not None or self.policy is not None

    def read(self, env: Mapping[str, str]) -> KeyRing:
        """Make the ring of all keys: the global one, which is admin, and those of the policy. Raises ConfigError."""
        secret = self.secret
        if self.file is not None:
            secret = read_key_file(self.file)
        elif secret is not None:
            secret = check_key(secret, "SUPERFLUID_API_KEY")
        named = [] if self.policy is None else read_policy(self.policy, env)
        own = [] if secret is None else [(secret, Principal(GLOBAL_KEY_NAME, admin=True))]
        if len(named) + len(own) > KEYS_MAX:
            raise ConfigError(f"more than {KEYS_MAX} API keys")
        if secret is not None:
            self._judge_global(digest_of(secret.encode()), [(k.digest, k.principal) for k in named])
        ring = KeyRing(own, [(key.digest, key.principal) for key in named])
        return ring if self.heads == 1 else ring.shared_by(self.heads)

    def _judge_global(self, digest: bytes, named: list[tuple[bytes, Principal]]) -> None:
        for other, principal in named:
            if hmac.compare_digest(other, digest):
                raise ConfigError(
                    f"key policy {self.policy}: the secret of {principal.name} is the global key"
                )
            if hmac.compare_digest(digest_of(principal.name.encode()), digest):
                raise ConfigError(f"key policy {self.policy}: a name in it is the global key")


@dataclass(frozen=True, slots=True)
class AccessRules:
    """What the door judges by, beside keys."""

    rate_limit_rpm: int = 0
    proxies: tuple[Network, ...] = ()
    conns_per_address: int = CONNS_PER_ADDRESS
    origins: tuple[str, ...] = ()
    certificate: Certificate | None = None
    sources: KeySources = field(default_factory=KeySources)


def build_access(value: Mapping[str, Any]) -> AccessRules:
    """Judge the settings together. Raises ConfigError."""
    secret, file, policy = value["api_key"], value["api_key_file"], value["key_policy"]
    if secret and file:
        raise ConfigError("give one API key: in the environment or in --api-key-file")
    if secret == "" and not file:
        raise ConfigError("the API key is empty")
    certificate, key = value["tls_cert"], value["tls_key"]
    if bool(certificate) != bool(key):
        raise ConfigError("--tls-cert and --tls-key go together")
    return AccessRules(
        rate_limit_rpm=share_of(value["rate_limit"], value["workers"]),
        proxies=tuple(value["trusted_proxy"] or ()),
        conns_per_address=value["conns_per_address"],
        origins=tuple(value["cors_origin"] or ()),
        certificate=Certificate(Path(certificate), Path(key)) if certificate else None,
        sources=KeySources(
            secret or None,
            Path(file) if file else None,
            Path(policy) if policy else None,
            heads=value["workers"],
        ),
    )
