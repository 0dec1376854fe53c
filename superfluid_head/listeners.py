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


def open_sockets(addresses: Iterable[tuple[str, int]]) -> list[socket.socket]:
    """Bind and listen. Raises ConfigError and leaves nothing open."""
    opened: list[socket.socket] = []
    for host, port in addresses:
        try:
            opened += [_open(family, address) for family, address in _resolve(host, port)]
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


def _open(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    # asyncio turns Nagle off only for sockets that say they are TCP
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != ANY_V6))
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def bound(sockets: Iterable[socket.socket]) -> list[tuple[str, int]]:
    """Where they really listen."""
    return [(str(one.getsockname()[0]), int(one.getsockname()[1])) for one in sockets]


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
