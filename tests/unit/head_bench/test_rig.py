"""The rig ends what it started, says why something did not come up, and never waits for ever."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from superfluid_head.bench.proxy import RecordingProxy
from superfluid_head.bench.rig import Rig, RigError, hostport

WRITES_READY = (
    "import json, pathlib, sys, time; path = pathlib.Path(sys.argv[-1]); new = path.with_suffix('.new');"
    "new.write_text(json.dumps({'http': [['127.0.0.1', 80]], 'listen': [['::1', 9]]}));"
    "new.replace(path); time.sleep(60)"
)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_child_is_ready_when_its_file_says_so_and_gone_when_the_rig_is() -> None:
    with Rig() as rig:
        child = rig.spawn("head", python(WRITES_READY))
        rig.wait_ready(child, timeout_s=20)
        assert child.url == "http://127.0.0.1:80"
        assert child.listen == "[::1]:9"
        assert is_alive(child.pid)
    assert not is_alive(child.pid)
    assert not rig.folder.exists()


def test_a_child_that_dies_is_reported_with_the_end_of_its_log() -> None:
    with Rig() as rig:
        child = rig.spawn("node-0", python("import sys; print('no such model'); sys.exit(3)"))
        with pytest.raises(RigError, match="node-0 ended with exit 3:\n    no such model"):
            rig.wait_ready(child, timeout_s=20)


def test_a_child_that_is_never_ready_is_given_up() -> None:
    with Rig() as rig:
        child = rig.spawn("slow", python("import time; time.sleep(60)"))
        with pytest.raises(RigError, match="not ready in 0 s"):
            rig.wait_ready(child, timeout_s=0.2)


def test_a_frozen_child_is_ended_too() -> None:
    with Rig() as rig:
        child = rig.spawn("frozen", python(WRITES_READY))
        rig.wait_ready(child, timeout_s=20)
        child.freeze()
    assert not is_alive(child.pid)


def test_the_newest_child_of_a_name_is_found() -> None:
    with Rig() as rig:
        rig.spawn("node-0", python("pass"))
        second = rig.spawn("node-0", python("pass"))
        assert rig.named("node-0") is second
        with pytest.raises(RigError):
            rig.named("node-9")


def test_addresses_of_both_families_are_written_right() -> None:
    assert hostport(["127.0.0.1", 80]) == "127.0.0.1:80"
    assert hostport(["::1", 80]) == "[::1]:80"


def test_a_recording_proxy_passes_on_and_keeps_what_it_saw() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        with RecordingProxy(f"127.0.0.1:{server.getsockname()[1]}") as proxy:
            host, _, port = proxy.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10) as near:
                far, _ = server.accept()
                with far:
                    far.settimeout(10)
                    near.sendall(b"ask")
                    assert far.recv(10) == b"ask"
                    far.sendall(b"answer")
                    assert near.recv(10) == b"answer"
            assert bytes(proxy.seen) == b"askanswer"
