"""The certificate of the HTTPS listener, and the context that serves it, which can be given a newer one while it serves.

A certificate is tried in a context of its own first: one that does not load, or whose key is another's, changes nothing. Links to
nodes have certificates of their own (`superfluid_core.link.tls`).
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from superfluid_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Certificate:
    """Two PEM files."""

    chain: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Make a context that serves it: TLS 1.2 and newer, HTTP/1.1. Raises ConfigError."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.set_alpn_protocols(["http/1.1"])
        self.load_into(made)
        return made

    def load_into(self, context: ssl.SSLContext) -> None:
        """Have `context` serve it in handshakes to come. Raises ConfigError."""
        try:
            context.load_cert_chain(self.chain, self.key, password=_no_password)
        except ssl.SSLError as error:
            reason = (error.reason or "not a certificate and its key").lower().replace("_", " ")
            raise ConfigError(f"--tls-cert {self.chain}, --tls-key {self.key}: {reason}") from None
        except OSError as error:
            raise ConfigError(
                f"--tls-cert {self.chain}, --tls-key {self.key}: {error.strerror}"
            ) from None
        except ValueError:
            raise ConfigError(f"--tls-key {self.key}: keys with a password are not read") from None


def _no_password() -> str:
    """Instead of a prompt on the terminal."""
    raise ValueError("no password")
