"""The sockets that clients connect to: opened before anything else, judged, printed with brackets around IPv6.

Owns addresses and nothing of HTTP. `::` listens for both families; names are resolved before they are judged.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from superfluid_core.errors import ConfigError
from superfluid_core.link.addresses import format_address, is_loopback

BACKLOG = 1_024
ANY_V6 = "::"


def open_sockets(
    addresses: Iterable[tuple[str, int]], *, is_shared: bool = False
) -> list[socket.socket]:
    """Bind and listen; with `is_shared` only bind, for other processes of this user do so too. Raises ConfigError and leaves nothing open."""
    opened: list[socket.socket] = []
    for host, port in addresses:
        try:
            for family, address in _resolve(host, port):
                opened.append(_bind(family, address, is_shared=is_shared))
                if not is_shared:
                    opened[-1].listen(BACKLOG)
        except OSError as error:
            for one in opened:
                one.close()
            where = format_address(host, port)
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None
    return opened


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    places = [(family, (str(address[0]), int(address[1]))) for family, _, _, _, address in found]
    return list(dict.fromkeys(places))


def reserve_sockets(addresses: Iterable[tuple[str, int]]) -> list[socket.socket]:
    """Bind for others to share, and do not listen. Raises ConfigError where somebody else listens, or workers cannot share."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("--workers needs a system on which processes can share a port")
    free = open_sockets(addresses)
    places = bound(free)
    families = [one.family for one in free]
    for one in free:
        one.close()
    try:
        return [_bind(*each, is_shared=True) for each in zip(families, places, strict=True)]
    except OSError as error:
        raise ConfigError(f"cannot share the port: {error.strerror or error}") from None


def _bind(
    family: socket.AddressFamily, address: tuple[str, int], *, is_shared: bool
) -> socket.socket:
    # asyncio turns Nagle off only for sockets that say they are TCP
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != ANY_V6))
        if is_shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def bound(sockets: Iterable[socket.socket]) -> list[tuple[str, int]]:
    """Where they really listen, those with a port."""
    named = [one.getsockname() for one in sockets if one.family != socket.AF_UNIX]
    return [(str(name[0]), int(name[1])) for name in named]


def loopback_ports(places: Iterable[tuple[str, int]]) -> frozenset[int]:
    """Ports of listeners that only this machine can reach."""
    return frozenset(port for host, port in places if is_loopback(host))


def judge_exposure(places: Sequence[tuple[str, int]], *, has_key: bool, insecure: bool) -> bool:
    """Refuse strangers without a key; returns whether strangers get in without one, as the operator wished."""
    exposed = [format_address(*place) for place in places if not is_loopback(place[0])]
    if has_key or not exposed:
        return False
    if not insecure:
        raise ConfigError(
            f"refusing to listen on {exposed[0]} without API keys: set SUPERFLUID_API_KEY or --api-key-file, "
            "listen on loopback, or accept everybody with --insecure-no-auth"
        )
    return True
