"""The link between real processes: who may join, and what somebody on the way can read."""

from __future__ import annotations

import asyncio

import pytest

from superfluid_core.clock import SystemClock
from superfluid_head.bench.failover import wait_linked
from superfluid_head.bench.load import chat_body, closed_loop, http_client
from superfluid_head.bench.proxy import RecordingProxy
from superfluid_head.bench.rig import Rig, RigError, program

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
FLAGS = ("--engine", "mock", "--model", "demo", "--mock-rates", "prefill=20000,decode=400")
PROMPTS = 100


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
