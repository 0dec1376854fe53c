"""Where requests come from, connections of one address, origins."""

from __future__ import annotations

import pytest

from superfluid_head.access.addresses import Connections, Proxies, counted_as, parse_network
from superfluid_head.access.origins import Origins, parse_origin

PROXIES = Proxies([parse_network("10.0.0.0/8"), parse_network("fd00::/8"), parse_network("192.0.2.7")])  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("203.0.113.5", ["198.51.100.1"], "203.0.113.5"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["6.6.6.6, 203.0.113.9, 10.9.9.9"], "203.0.113.9"),
        ("10.0.0.1", ["6.6.6.6", "203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["203.0.113.9, nonsense"], "10.0.0.1"),
        ("10.0.0.1", ["nonsense, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["", ","], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9:4711"], "203.0.113.9"),
        ("fd00::1", ["[2001:db8::7]:4711"], "2001:db8::7"),
        ("::ffff:10.0.0.1", ["::ffff:203.0.113.9"], "203.0.113.9"),
        ("192.0.2.7", ["2001:db8::8"], "2001:db8::8"),
        ("192.0.2.8", ["2001:db8::8"], "192.0.2.8"),
        ("10.0.0.1", [", ".join(["10.0.0.2"] * 5_000)], "10.0.0.2"),
        ("", ["203.0.113.9"], ""),
    ],
)
def test_only_trusted_proxies_say_who_asks(peer: str, forwarded: list[str], client: str) -> None:
    assert PROXIES.client(peer, forwarded) == client


def test_no_proxy_is_trusted_by_default() -> None:
    assert Proxies().client("127.0.0.1", ["203.0.113.9"]) == "127.0.0.1"


def test_an_ipv6_client_is_its_network() -> None:
    assert (
        counted_as("2001:db8:1:2:3::4") == counted_as("2001:db8:1:2:ffff::1") == "2001:db8:1:2::/64"
    )
    assert counted_as("::ffff:1.2.3.4") == counted_as("1.2.3.4") == "1.2.3.4"
    assert counted_as("testclient") == "testclient"


def test_connections_of_an_address_are_bounded_but_not_this_machines_nor_proxies() -> None:
    open_ones = Connections(2, PROXIES)
    assert [open_ones.enter("203.0.113.9") for _ in range(3)] == [True, True, False]
    assert open_ones.enter("203.0.113.8")
    open_ones.leave("203.0.113.9")
    assert open_ones.enter("203.0.113.9")
    for free in ("127.0.0.1", "::1", "10.1.2.3", "::ffff:127.0.0.1"):
        assert all(open_ones.enter(free) for _ in range(10))
        open_ones.leave(free)
    assert all(Connections(0, PROXIES).enter("203.0.113.9") for _ in range(99))


@pytest.mark.parametrize("text", ["", "x", "app.example", "ftp://a", "https://a/b", "https://", "https://u@a", "https://a:x", "https://a b", "null", "https://a?x", "**"])  # fmt: skip
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="origin"):
        parse_origin(text)


@pytest.mark.parametrize("text", ["", "10.0.0.0/33", "proxy.example", "10.0.0"])
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="network"):
        parse_network(text)


def test_origins_are_compared_whole() -> None:
    listed = Origins([parse_origin("https://App.example/"), parse_origin("http://[::1]:3000")])
    assert listed.allow("https://app.example")
    assert listed.allow("HTTP://[::1]:3000")
    for other in (
        "https://app.example.evil",
        "http://app.example",
        "https://app.example:8443",
        "*",
        "null",
        "",
    ):
        assert not listed.allow(other)
    assert Origins([parse_origin("*")]).allow("https://any.example")
    assert not Origins().allow("*")
