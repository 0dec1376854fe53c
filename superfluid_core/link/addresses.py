"""Addresses as people write them, and whether a bind is safe. Pure: names are resolved by the caller.

A node without a key may listen on loopback only, unless it was told `--insecure-no-auth`. `0.0.0.0` and `::` are every
address of the machine; an IPv4-mapped IPv6 address is judged as the IPv4 address that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

from superfluid_core.errors import ConfigError

PORT_MAX = 65_535
KNOWN_MAX = 1_024
"""Addresses whose reading is kept: few ask often."""


def parse_address(text: str, default_port: int) -> tuple[str, int]:
    """Split `host`, `host:port`, `[v6]`, `[v6]:port` or a bare v6 address. Raises ConfigError."""
    text = text.strip()
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ConfigError(f"cannot read the address {text[:100]!r}")
        port = rest[1:] if rest else None
    elif text.count(":") > 1:
        host, port = text, None  # a bare IPv6 address
    else:
        host, colon, port_text = text.partition(":")
        port = port_text if colon else None
    if not host or any(char.isspace() for char in host):
        raise ConfigError(f"the address {text[:100]!r} names no host")
    if port is None:
        return host, default_port
    if not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > PORT_MAX:
        raise ConfigError(f"the address {text[:100]!r} has no port within 0 and {PORT_MAX}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Write it so that parse_address reads it back."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@lru_cache(KNOWN_MAX)
def is_loopback(address: str) -> bool:
    """Whether nothing outside this machine can reach the (resolved) address."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped.is_loopback
    return parsed.is_loopback


def judge_bind(addresses: Sequence[str], *, has_key: bool, insecure: bool) -> None:
    """Refuse to listen without a key where others can connect. Raises ConfigError."""
    if has_key or insecure:
        return
    exposed = [address for address in addresses if not is_loopback(address)]
    if exposed or not addresses:
        where = exposed[0] if exposed else "an unknown address"
        raise ConfigError(
            f"refusing to listen on {where} without a fleet key: give a key file, listen on loopback, "
            "or accept everybody with --insecure-no-auth"
        )
