"""The link between real processes: who may join, and what somebody on the way can read."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from pathlib import Path

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.link.keys import keys_from_secrets
from superfluid_core.link.pki import FLAGS as PKI_FLAGS
from superfluid_core.wire.schema import Role
from superfluid_head.bench.load import chat_body, closed_loop, http_client
from superfluid_head.bench.proxy import RecordingProxy
from superfluid_head.bench.rig import Rig, RigError, program
from superfluid_head.bench.small_fleet import wait_linked
from tests.unit.link.test_pki import issue

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
FLAGS = ("--engine", "mock", "--model", "demo", "--mock-rates", "prefill=20000,decode=400")
PROMPTS = 100


def rig_text(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as reply:
        return str(reply.read().decode())


def test_a_wrong_key_is_refused_and_both_logs_say_why(rig: Rig) -> None:
    ours, theirs = rig.make_key("ours.key"), rig.make_key("theirs.key")
    node = rig.start_node("node-0", *FLAGS, key=theirs)
    rig.wait_ready(node)
    head = rig.start_head("demo", nodes=[node.listen], key=ours)
    head_log = rig.wait_for_log(head, "another key")
    node_log = rig.wait_for_log(node, "usually another key")
    for secret in (line for key in (ours, theirs) for line in key.read_text().splitlines() if line):
        assert secret not in head_log
        assert secret not in node_log


def test_somebody_on_the_way_reads_no_prompt(rig: Rig) -> None:
    key = rig.make_key()
    node = rig.start_node("node-0", "--model-name", "served", *FLAGS, key=key)
    rig.wait_ready(node)
    words = [f"quincunx{number:03d}marzipan" for number in range(PROMPTS)]
    with RecordingProxy(node.listen) as proxy:
        head = rig.start_head("demo", nodes=[proxy.address], key=key)
        rig.wait_ready(head)
        wait_linked(rig, head, 1)
        bodies = [chat_body("served", f"Repeat {word}.", 4) for word in words]

        async def send() -> list[str | None]:
            async with http_client() as client:
                answers = await closed_loop(client, head.url, bodies, 8, SystemClock())
                return [answer.error for answer in answers]

        assert asyncio.run(send()) == [None] * PROMPTS
        seen = bytes(proxy.seen)
    assert len(seen) > PROMPTS * 100
    assert not [word for word in words if word.encode() in seen]
    assert b"quincunx" not in seen
    assert b"prompt" not in seen


def test_a_node_without_a_key_does_not_listen_beyond_loopback(rig: Rig) -> None:
    node = rig.spawn("node-0", [*program("superfluid-noded"), "--listen", "0.0.0.0:0", *FLAGS])
    with pytest.raises(RigError):
        rig.wait_ready(node, timeout_s=30)
    assert node.process.returncode in (2, 3)
    assert "--insecure-no-auth" in node.log_text()


def test_a_head_and_a_node_without_keys_meet_on_loopback_when_told_to(rig: Rig) -> None:
    node = rig.start_node("node-0", *FLAGS, key=None)
    rig.wait_ready(node)
    head = rig.start_head("demo", "--insecure-no-auth", nodes=[node.listen])
    rig.wait_ready(head)
    wait_linked(rig, head, 1)


def test_a_node_refuses_a_key_that_everybody_can_read(rig: Rig) -> None:
    key = rig.make_key()
    key.chmod(0o644)
    node = rig.start_node("node-0", *FLAGS, key=key)
    with pytest.raises(RigError):
        rig.wait_ready(node, timeout_s=30)
    assert node.process.returncode in (2, 3)


def test_a_node_joins_by_certificate_and_no_key_shows_anywhere(rig: Rig) -> None:
    """An own authority on both sides, a node that only dials; names, metrics and the command lines hold no secret."""
    authority = keys_from_secrets((b"a" * 32,))
    sides = {role: issue(rig.folder / str(role), authority, role, f"{role}-1") for role in Role}

    def flags(role: Role) -> list[str]:
        files = sides[role]
        pairs = zip(PKI_FLAGS, (files.ca, files.certificate, files.key), strict=True)
        return [part for pair in pairs for part in pair]

    head = rig.start_head("demo", "--fleet-listen", "127.0.0.1:0", *flags(Role.HEAD))
    rig.wait_ready(head)
    where = f"127.0.0.1:{head.ready['fleet'][0][1]}"
    command = [*program("superfluid-noded"), "--listen", "off", "--join", where]
    names = ("--model-name", "served", "--metrics", "127.0.0.1:0")
    node = rig.spawn("node", [*command, *FLAGS, *names, *flags(Role.NODE)])
    rig.wait_ready(node)
    wait_linked(rig, head, 1)

    async def send() -> list[str | None]:
        async with http_client() as client:
            bodies = [chat_body("served", "Say something.", 8)] * 4
            answers = await closed_loop(client, head.url, bodies, 2, SystemClock())
            return [answer.error for answer in answers]

    assert asyncio.run(send()) == [None] * 4
    state = json.loads(rig_text(head.url + "/v1/fleet"))["nodes"][0]
    assert (state["name"], state["link"], state["links"]) == ("node-1", "joined", 1)
    assert (state["key"], state["rekeys"], state["is_up"]) == ("own authority", 0, True)
    shown = "".join(
        Path(f"/proc/{child.pid}/cmdline").read_text() + child.log_text() for child in (head, node)
    )
    shown += rig_text(head.url + "/metrics") + rig_text(
        f"http://127.0.0.1:{node.ready['metrics'][1]}/metrics"
    )
    assert 'superfluid_head_link_events_total{event="joined"} 1.0' in shown
    assert "superfluid_joins_total 1.0" in shown
    for files in sides.values():
        for line in Path(files.key).read_text().splitlines()[1:-1]:
            assert line not in shown
    node.signal(signal.SIGTERM)
    rig.wait_for_log(head, "node going away")
