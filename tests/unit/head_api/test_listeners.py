"""Listeners: HTTPS and its reload, IPv6, connections of one address, keys that change under load."""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import json
import os
import signal
import socket
import ssl
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from superfluid_core.errors import ConfigError
from superfluid_core.limits import HttpLimits
from superfluid_head.access.addresses import Connections, Proxies
from superfluid_head.access.certificate import Certificate
from superfluid_head.access.rules import KeySources
from superfluid_head.api.protocol import protocol_class
from superfluid_head.app import build_app
from superfluid_head.config import build_config, read_settings, surroundings
from superfluid_head.http_server import http_server
from superfluid_head.listeners import bound, open_sockets
from superfluid_head.reload import Reloader, Reread
from tests.unit.head_api.conftest import Bench, chat_body

KEY = "sk-abcdef123456"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SUPERFLUID_")]:
        monkeypatch.delenv(name)


def write_certificate(folder: Path, name: str) -> Certificate:
    """A self-signed certificate for loopback whose subject is `name`."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    places = [x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")]
    made = (
        x509.CertificateBuilder().subject_name(who).issuer_name(who).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    files = Certificate(folder / "cert.pem", folder / "key.pem")
    files.chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return files


def served_name(port: int) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
        context.wrap_socket(raw) as line,
    ):
        shown = line.getpeercert(binary_form=True)
        assert shown is not None
    subject = x509.load_der_x509_certificate(shown).subject
    return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


async def serving(bench: Bench, work: Callable[[int], Any], **parts: Any) -> Any:
    """Serve on loopback while `work` runs in a thread with the port."""
    sockets = open_sockets([("127.0.0.1", 0)])
    port = bound(sockets)[0][1]
    server = http_server(build_app(bench.head, frozenset({port})), bench.limits, **parts)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=sockets))
        try:
            return await asyncio.to_thread(work, port)
        finally:
            server.should_exit = True


def test_https_serves_streams_and_takes_a_new_certificate_while_it_serves(
    bench: Bench, tmp_path: Path
) -> None:
    files = write_certificate(tmp_path, "first")
    context = files.context()

    def work(port: int) -> list[str]:
        trusted = ssl.create_default_context(cafile=str(files.chain))
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", verify=trusted, trust_env=False
        ) as client:
            body = chat_body(stream=True)
            assert client.post("/v1/chat/completions", json=body).text.endswith("[DONE]\n\n")
            names = [served_name(port)]
            write_certificate(tmp_path, "second").load_into(context)
            names.append(served_name(port))
            assert client.get("/livez").is_success, "connections go on"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/livez", trust_env=False)
        return names

    assert asyncio.run(serving(bench, work, tls=context)) == ["first", "second"]


def test_a_silent_handshake_has_a_deadline(make_bench: Any, tmp_path: Path) -> None:
    bench = make_bench(limits=HttpLimits(header_ms=200))

    def work(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as silent:
            return silent.recv(100)

    found = asyncio.run(serving(bench, work, tls=write_certificate(tmp_path, "x").context()))
    assert found == b""


def test_a_certificate_that_cannot_be_served_is_refused_by_its_files(tmp_path: Path) -> None:
    good = write_certificate(tmp_path, "x")
    (tmp_path / "other").mkdir()
    other = write_certificate(tmp_path / "other", "y")
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("SECRET")
    for chain, key in [
        (good.chain, other.key),
        (wrong, good.key),
        (good.chain, wrong),
        (good.chain, tmp_path / "no"),
    ]:
        with pytest.raises(ConfigError, match="tls-key") as caught:
            Certificate(chain, key).context()
        assert "SECRET" not in caught.value.message
    locked = tmp_path / "locked.pem"
    found = serialization.load_pem_private_key(good.key.read_bytes(), None)
    form = serialization.PrivateFormat.PKCS8
    locked.write_bytes(
        found.private_bytes(
            serialization.Encoding.PEM, form, serialization.BestAvailableEncryption(b"p")
        )
    )
    with pytest.raises(ConfigError):
        Certificate(good.chain, locked).context()


def settings(**flags: Any) -> Any:
    return build_config(read_settings({"fleet": ("127.0.0.1:1",), **flags}, None), surroundings())


def test_the_doors_settings_arrive_and_contradictions_are_refused(tmp_path: Path) -> None:
    policy = tmp_path / "keys.json"
    policy.write_text(json.dumps({"keys": [{"name": "a", "key": KEY}]}))
    policy.chmod(0o600)
    config = settings(
        key_policy=str(policy), rate_limit="60", trusted_proxy=("10.0.0.0/8", "::1"), conns_per_address="9",
        cors_origin=("https://app.example",), tls_cert="c.pem", tls_key="k.pem",
    )  # fmt: skip
    access = config.access
    assert (access.rate_limit_rpm, len(access.proxies), access.conns_per_address) == (60, 2, 9)
    assert access.origins == ("https://app.example",)
    assert access.certificate == Certificate(Path("c.pem"), Path("k.pem"))
    assert config.keys.names == {"a"}
    assert settings().keys.is_empty
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tls_cert": "c.pem"}, "go together"), ({"tls_key": "k.pem"}, "go together"), ({"trusted_proxy": ("x",)}, "network"),
        ({"cors_origin": ("app.example",)}, "origin"), ({"rate_limit": "-1"}, "rate-limit"), ({"key_policy": "/no/such"}, "No such"),
    ]  # fmt: skip
    for flags, words in wrong:
        with pytest.raises(ConfigError, match=words):
            settings(**flags)


class Line:
    """A transport from somewhere."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_aborted = False

    def get_extra_info(self, name: str) -> Any:
        return (self.address, 4711) if name == "peername" else None

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        assert low < high <= HttpLimits().slow_client_bytes_max

    def abort(self) -> None:
        self.is_aborted = True

    close = abort


def test_an_address_has_so_many_connections_and_this_machine_any_number() -> None:
    async def connect() -> None:
        server = http_server(cast("Any", None), HttpLimits())
        server.config.load()
        made = protocol_class(HttpLimits(), Connections(2, Proxies()))

        def line(address: str) -> tuple[Any, Line]:
            protocol = made(server.config, server.server_state, {})
            transport = Line(address)
            protocol.connection_made(transport)
            return protocol, transport

        lines = [line("203.0.113.9") for _ in range(3)]
        assert [transport.is_aborted for _, transport in lines] == [False, False, True]
        for protocol, _ in reversed(lines):
            protocol.connection_lost(None)
        assert not line("203.0.113.9")[1].is_aborted
        assert not any(line("127.0.0.1")[1].is_aborted for _ in range(20))

    asyncio.run(connect())


@pytest.mark.parametrize(("host", "families"), [("::1", {"::1"}), ("127.0.0.1", {"127.0.0.1"}), ("localhost", {"127.0.0.1"}), ("::", {"::1", "127.0.0.1"})])  # fmt: skip
def test_o12_every_address_is_listened_on_over_its_families(
    bench: Bench, host: str, families: set[str]
) -> None:
    try:
        sockets = open_sockets([(host, 0)])
    except ConfigError:
        assert not socket.has_ipv6 or ":" in host, "only a machine without IPv6 may refuse"
        return
    port = bound(sockets)[0][1]

    def ask() -> set[str]:
        heard = set()
        for address in ("::1", "127.0.0.1"):
            shown = f"[{address}]" if ":" in address else address
            try:
                if httpx.get(f"http://{shown}:{port}/livez", trust_env=False).is_success:
                    heard.add(address)
            except httpx.ConnectError:
                pass
        return heard

    async def serve() -> set[str]:
        server = http_server(build_app(bench.head), bench.limits)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=sockets))
            heard = await asyncio.to_thread(ask)
            server.should_exit = True
        return heard

    assert families <= asyncio.run(serve())


# --- reload ---------------------------------------------------------------------------------------


def write_policy(file: Path, *keys: Any) -> None:
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps({"keys": list(keys)}))
    draft.chmod(0o600)
    draft.replace(file)


OLD, NEW = {"name": "a", "key": "sk-old-key-1234"}, {"name": "b", "key": "sk-new-key-1234"}


def test_a_policy_is_read_again_by_the_signal_and_a_bad_one_leaves_the_old_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"
    write_policy(file, OLD)
    sources = KeySources(policy=file)
    ring = sources.read({})
    config = SimpleNamespace(fleet_texts=(), is_fleet_judged=False)
    reread = Reread("API keys", lambda: sources.read({}), ring.adopt)

    async def all_of_it() -> None:
        reloader = Reloader(cast("Any", config), cast("Any", None), [reread])

        async def again(said: str) -> None:
            caplog.clear()
            os.kill(os.getpid(), signal.SIGHUP)
            for _ in range(1_000):
                if said in caplog.text:
                    return
                await asyncio.sleep(0.005)
            raise AssertionError("nothing came of the signal")

        async with asyncio.TaskGroup() as group:
            task = group.create_task(reloader.run())
            write_policy(file, OLD, NEW)
            await again("were read again")
            assert ring.names == {"a", "b"}
            for broken in ("{", '{"keys": []}', json.dumps({"keys": [{**NEW, "SECRET": 1}]})):
                file.write_text(broken)
                await again("stay as they were")
                assert ring.names == {"a", "b"}
                assert "SECRET" not in caplog.text
                assert "sk-" not in caplog.text
            file.unlink()
            await again("stay as they were")
            write_policy(file, NEW)
            await again("were read again")
            assert ring.find(b"sk-old-key-1234") is None
            assert ring.names == {"b"}
            task.cancel()

    with caplog.at_level("INFO"):
        asyncio.run(all_of_it())


def test_keys_that_are_read_again_under_load_drop_nothing(
    make_bench: Any, serve: Any, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    write_policy(file, OLD)
    ring = KeySources(policy=file).read({})
    bench = make_bench(keys=ring)
    bench.fleet.say(*("ab" * 10), step_s=0.002)
    stop = False

    def ask(number: int) -> int:
        done = 0
        headers = {"x-api-key": str(OLD["key"])}
        with httpx.Client(base_url=live.url, headers=headers, trust_env=False) as client:
            while not stop:
                reply = client.post("/v1/chat/completions", json=chat_body(stream=number % 2 == 0))
                assert reply.status_code == 200, reply.text
                assert number % 2 or reply.text.endswith("[DONE]\n\n")
                done += 1
        return done

    with serve(bench) as live, concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, number) for number in range(4)]
        for turn in range(30):
            write_policy(
                file, {**OLD, "weight": 1 + turn, "models": ["org/m"]}, *([NEW] if turn % 2 else [])
            )
            fresh = KeySources(policy=file).read({})
            live.call(lambda fresh=fresh: ring.adopt(fresh))
            concurrent.futures.wait(asked, timeout=0.02)
        stop = True
        assert all(each.result(10) > 0 for each in asked)
    assert len({request.weight for request in bench.fleet.requests}) > 1
    assert bench.head.quotas.in_flight("a") == 0
