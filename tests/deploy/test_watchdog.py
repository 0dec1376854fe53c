"""The real programs under a supervisor's socket: ready, status, a watchdog that a hung engine starves, drain, stop."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.clock import SECOND, SystemClock
from superfluid_core.limits import LinkLimits
from superfluid_core.link.dial import dial
from superfluid_core.modelfiles.resolve import resolve
from superfluid_core.wire.messages import MINOR, Hello, Opened, Welcome
from superfluid_noded.config import Surroundings
from superfluid_noded.supervisor import LOAD_MS_MAX, STOP_MARGIN_MS
from superfluid_noded.supervisor import Supervisor as Teller
from tests.deploy.supervision import SECONDS, Supervisor, settings, supervised
from tests.unit.noded.conftest import HeadEnd, JumpClock

NODE, HEAD = "superfluid_noded.cli", "superfluid_head.cli"
NODE_UNIT, HEAD_UNIT = "superfluid-noded@.service", "superfluid-head.service"
MOCK = ("--engine", "mock", "--model", "demo", "--mock-eos", "0", "--metrics", "off")
HUNG_S = LinkLimits().engine_hung_ms / 1000


class HandClock(SystemClock):
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.at_ns = 5 * SECOND

    def now_ns(self) -> int:
        return self.at_ns


def around(supervisor: Supervisor) -> Surroundings:
    given = supervisor.environment()
    return Surroundings(given["NOTIFY_SOCKET"], given["WATCHDOG_USEC"], None, None)


def test_a_node_that_loads_asks_for_more_time_again_and_again_but_not_for_ever(
    tmp_path: Path,
) -> None:
    supervisor, clock = Supervisor(tmp_path, 1), HandClock()
    teller = Teller(around(supervisor), clock)
    teller.loading("m")
    assert supervisor.hear() == {
        "STATUS": "loading m for 0 s",
        "EXTEND_TIMEOUT_USEC": "30000000",
    }
    clock.at_ns += 3_600 * SECOND
    teller.loading("m")
    assert supervisor.hear()["EXTEND_TIMEOUT_USEC"] == "30000000"
    clock.at_ns += LOAD_MS_MAX * 1_000_000
    teller.loading("m")
    assert supervisor.hear() == {"STATUS": f"loading m for {3_600 + LOAD_MS_MAX // 1000} s"}
    supervisor.channel.close()


def test_a_stop_asks_for_the_whole_grace_whatever_the_units_timeout_is(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 1)
    Teller(around(supervisor), SystemClock()).draining(3, 600_000)
    said = supervisor.hear()
    assert said["STOPPING"] == "1"
    assert said["EXTEND_TIMEOUT_USEC"] == str((600_000 + STOP_MARGIN_MS) * 1000)
    assert said["STATUS"] == "draining 3 sessions"
    supervisor.channel.close()


def test_the_watchdog_is_starved_exactly_while_an_engine_hangs(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 0.04)
    teller = Teller(around(supervisor), SystemClock())
    answers = [False, False, True, True, False]

    async def main() -> None:
        feeding = asyncio.get_running_loop().create_task(
            teller.feed(lambda: answers.pop(0) if answers else False, lambda: 2)
        )
        while answers:  # noqa: ASYNC110 - the supervisor's socket is read afterwards
            await asyncio.sleep(0.005)
        feeding.cancel()

    asyncio.run(main())
    said = [supervisor.hear() for _ in range(5)]
    assert ["WATCHDOG" in each for each in said] == [True, True, False, False, True]
    assert said[2]["STATUS"].startswith("the engine hangs")
    assert said[0]["STATUS"] == "serving, 2 sessions live"
    supervisor.channel.close()


async def hang(port: int, word: str) -> HeadEnd:
    """Open the session that the engine cannot stand, and see it taken."""
    clock = JumpClock()
    hello = Hello(MINOR, (), "head-1")
    link = await dial("127.0.0.1", port, keys=None, hello=hello, limits=LinkLimits(), clock=clock)
    assert isinstance(link.peer, Welcome)
    head = HeadEnd(link, clock)
    prompt = tuple(resolve("demo").tokenizer().encode(f"say {word}", allow_special=False))
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(head.read())
        head.open(model=link.peer.models[0].name, prompt=prompt, max_output=50)
        await head.until(lambda: head.of(Opened))
        reading.cancel()
    link.abort("seen")
    return head


def serving_on(said: dict[str, str]) -> int:
    return int(said["STATUS"].rpartition(":")[2])


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_node_whose_engine_hangs_is_no_longer_fed_for_and_tells_where_it_hung(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.jsonl"
    answer = {"match": "stillwaterton", "pieces": ["abc"], "fault": "hang", "fault_at": 0}
    script.write_text(json.dumps(answer) + "\n", encoding="utf-8")
    flags = (*MOCK, "--listen", "127.0.0.1:0", "--mock-script", str(script))
    with supervised(tmp_path, NODE, *flags, unit=NODE_UNIT) as (supervisor, process):
        assert supervisor.hear()["STATUS"].startswith("loading demo")
        port = serving_on(supervisor.until("READY"))
        # idle: longer than the watchdog's timeout, and fed all the while
        for _ in range(4):
            assert "WATCHDOG" in supervisor.hear()
        asyncio.run(hang(port, "stillwaterton"))
        hung = time.monotonic()
        supervisor.until("STATUS", "the engine hangs")
        assert time.monotonic() - hung > HUNG_S - 1
        # starved for longer than the watchdog's timeout: now systemd acts
        for _ in range(4):
            assert "WATCHDOG" not in supervisor.hear()
        process.send_signal(signal.SIGABRT)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in err
    assert "engine/sim.py" in err, "the journal says in which line the engine hung"


def drained(supervisor: Supervisor, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Ask a program to stop; returns what it says then. It ends with 0."""
    process.send_signal(signal.SIGTERM)
    said = supervisor.until("STOPPING")
    assert process.wait(SECONDS) == 0
    return said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_node_and_a_head_say_that_they_serve_live_and_drain(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "head").mkdir()
    listen = ("--listen", "127.0.0.1:0")
    with supervised(tmp_path / "node", NODE, *MOCK, *listen, unit=NODE_UNIT) as (above, node):
        port = serving_on(above.until("READY"))
        flags = ("serve", "--fleet", f"127.0.0.1:{port}", "--http", "127.0.0.1:0")
        with supervised(tmp_path / "head", HEAD, *flags, unit=HEAD_UNIT) as (beside, head):
            beside.until("READY")
            assert beside.until("WATCHDOG")["STATUS"].startswith("serving")
            beside.until("STATUS", "serving 1 model; 1 of 1 nodes up; 0 in flight")
            said = drained(beside, head)
            assert said["STATUS"] == "draining 0 in flight"
            stop_s = int(said["EXTEND_TIMEOUT_USEC"]) / 1e6
            assert stop_s <= float(settings(HEAD_UNIT)["TimeoutStopSec"][0])
        assert "WATCHDOG" in above.hear()
        said = drained(above, node)
        assert said["STATUS"] == "draining 0 sessions"
        stop_s = int(said["EXTEND_TIMEOUT_USEC"]) / 1e6
        assert stop_s <= float(settings(NODE_UNIT)["TimeoutStopSec"][0])
