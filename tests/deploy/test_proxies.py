"""The examples for nginx and Caddy: accepted by them, and in front of a real head: events one by one, over TLS, with its Host and Origin rules."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from superfluid_core.limits import MIB, HttpLimits
from tests.deploy.programs import DEPLOY
from tests.deploy.supervision import ROOT, SECONDS, supervised
from tests.deploy.test_watchdog import HEAD, HEAD_UNIT, MOCK, NODE, NODE_UNIT, serving_on
from tests.unit.head_api.test_listeners import write_certificate

PROXY = DEPLOY / "proxy"
SITE = "llm.example.org"
TOKENS, RATE = 12, 12


def program(name: str) -> str:
    places = os.pathsep.join(str(ROOT / ".venv/tools/usr" / folder) for folder in ("sbin", "bin"))
    found = shutil.which(name) or shutil.which(name, path=f"/usr/sbin{os.pathsep}{places}")
    if found is None:
        pytest.skip(f"{name} is not installed (.ci/tools brings it)")
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def nginx(folder: Path, head: int, port: int) -> tuple[list[str], Path]:
    """Lay out nginx with our file, on ports and with a certificate of the test."""
    (other,) = free_ports(1)
    text = (PROXY / "nginx.conf").read_text(encoding="utf-8")
    text = re.sub(r" *listen \[::\]:.*\n", "", text)
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("listen 80;", f"listen 127.0.0.1:{other};")
    text = text.replace("/etc/nginx/tls/chain.pem", f"{folder}/cert.pem")
    text = text.replace("/etc/nginx/tls/key.pem", f"{folder}/key.pem")
    text = text.replace("server 127.0.0.1:8453", f"server 127.0.0.1:{head}")
    (folder / "superfluid.conf").write_text(text, encoding="utf-8")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    main = folder / "nginx.conf"
    main.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;"
        f"events {{ worker_connections 64; }}"
        f"http {{ access_log off; {paths} include {folder}/superfluid.conf; }}\n",
        encoding="utf-8",
    )
    return [program("nginx"), "-e", "stderr", "-c", str(main)], main


def caddy(folder: Path, head: int, port: int) -> tuple[list[str], Path]:
    """Lay out Caddy with our file; it is given the test's certificate, and asks nobody for one."""
    text = (PROXY / "Caddyfile").read_text(encoding="utf-8")
    text = text.replace(
        f"{SITE} {{\n",
        f"{{\n\tadmin off\n\tauto_https disable_redirects\n}}\nhttps://{SITE}:{port} {{\n"
        f"\tbind 127.0.0.1\n\ttls {folder}/cert.pem {folder}/key.pem\n",
    ).replace("127.0.0.1:8453 {", f"127.0.0.1:{head} {{")
    main = folder / "Caddyfile"
    main.write_text(text, encoding="utf-8")
    return [program("caddy"), "run", "--adapter", "caddyfile", "--config", str(main)], main


PROXIES = {"nginx": nginx, "caddy": caddy}


@contextlib.contextmanager
def running(command: list[str], folder: Path, port: int) -> Iterator[None]:
    environment = {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "proxy.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        end = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, (folder / "proxy.log").read_text()
            assert time.monotonic() < end, (folder / "proxy.log").read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(SECONDS)


@contextlib.contextmanager
def fleet(folder: Path) -> Iterator[int]:
    """Run a node that writes a few tokens a second and a head set up as the examples say; gives the head's port."""
    rates = ("--mock-rates", f"prefill=0,decode={RATE}", "--mock-eos", "0")
    (folder / "node").mkdir()
    (folder / "head").mkdir()
    listen = ("--listen", "127.0.0.1:0")
    with supervised(folder / "node", NODE, *MOCK, *rates, *listen, unit=NODE_UNIT) as (node, _):
        words = re.findall(r"--[a-z-]+ \S+", (PROXY / "nginx.conf").read_text("utf-8"))
        flags = [part for word in words for part in word.rstrip(":").split()]
        assert "--trusted-proxy" in flags
        assert "--cors-origin" in flags
        flags[flags.index("--http") + 1] = "127.0.0.1:0"
        ready = folder / "ready.json"
        flags += [
            "--fleet",
            f"127.0.0.1:{serving_on(node.until('READY'))}",
            "--ready-file",
            str(ready),
        ]
        with supervised(folder / "head", HEAD, "serve", *flags, unit=HEAD_UNIT) as (head, _):
            head.until("STATUS", "serving 1 model; 1 of 1 nodes up")
            yield int(json.loads(ready.read_text())["http"][0][1])


def stream(client: httpx.Client) -> list[float]:
    """Ask for a stream, as a page of the site; returns when each event arrived."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": TOKENS}
    origin = {"origin": f"https://{SITE}"}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=origin) as reply:
        assert reply.status_code == 200, reply.read()
        return [time.monotonic() for line in reply.iter_lines() if line.startswith("data: {")]


def judge(port: int) -> None:
    trust = ssl.create_default_context()
    trust.check_hostname = False
    trust.verify_mode = ssl.CERT_NONE
    base = f"https://127.0.0.1:{port}"
    host = {"host": f"{SITE}:{port}"}
    with httpx.Client(verify=trust, base_url=base, headers=host, trust_env=False, timeout=SECONDS) as client:  # fmt: skip
        extensions = {"sni_hostname": SITE}
        assert client.get("/v1/models", extensions=extensions).status_code == 200
        assert client.get("/metrics", extensions=extensions).status_code == 404
        client.event_hooks = {"request": [lambda request: request.extensions.update(extensions)]}
        foreign = {"origin": "https://elsewhere.example"}
        assert client.post("/v1/chat/completions", json={}, headers=foreign).status_code == 403
        arrived = stream(client)
    gaps = [after - before for before, after in itertools.pairwise(arrived)]
    assert len(arrived) >= TOKENS
    # a proxy that buffers would hand over all of it at once
    assert sum(gap > 0.3 / RATE for gap in gaps) >= TOKENS // 2, gaps


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_events_pass_each_proxy_one_by_one(tmp_path: Path) -> None:
    there = {name: make for name, make in PROXIES.items() if program(name)}
    with fleet(tmp_path) as head:
        for name, make in there.items():
            folder = tmp_path / name
            folder.mkdir()
            write_certificate(folder, SITE)
            (port,) = free_ports(1)
            command, _ = make(folder, head, port)
            with running(command, folder, port):
                judge(port)


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_accepts_its_example(name: str, tmp_path: Path) -> None:
    write_certificate(tmp_path, SITE)
    command, main = PROXIES[name](tmp_path, 1, 2)
    if name == "nginx":
        words = [*command, "-t"]
    else:
        words = [command[0], "validate", "--adapter", "caddyfile", "--config", str(main)]
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    run = subprocess.run(
        words, capture_output=True, text=True, timeout=30, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    main.write_text(main.read_text() + "\nbuffering_of_a_kind on;\n", encoding="utf-8")
    run = subprocess.run(
        words, capture_output=True, text=True, timeout=30, check=False, env=environment
    )
    assert run.returncode != 0


def test_proxies_let_through_what_a_head_accepts_and_wait_longer_than_it_is_silent() -> None:
    body_mib, limits = HttpLimits().body_bytes_max // MIB, HttpLimits()
    text = (PROXY / "nginx.conf").read_text(encoding="utf-8")
    assert f"client_max_body_size {body_mib}m;" in text
    (read_s,) = re.findall(r"proxy_read_timeout +(\d+)s;", text)
    assert int(read_s) * 1000 > 10 * limits.silence_ms
    assert "proxy_buffering         off;" in text
    text = (PROXY / "Caddyfile").read_text(encoding="utf-8")
    assert f"max_size {body_mib}MiB" in text
    assert "flush_interval -1" in text
    (keep_s,) = re.findall(r"keepalive (\d+)s", text)
    assert int(keep_s) <= limits.keep_alive_s
