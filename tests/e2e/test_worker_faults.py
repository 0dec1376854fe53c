"""`serve --workers 2` under faults: SIGHUP with good and bad files, a worker that is frozen, one that is killed with a child of its own.

The supervisor is the test: it hears what systemd would, with the times at which it does.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from superfluid_head.bench.rig import Child, Rig
from superfluid_head.bench.spent import tree
from tests.deploy.supervision import Supervisor

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(150)]

FLAGS = ("--engine", "mock", "--model", "demo", "--mock-eos", "0", "--max-batch", "32")
WATCHDOG_S = 16.0
"""A worker hangs after half of it; a stall of this machine is shorter."""
ASKS = 16
"""Connections after which both workers were asked, but for one time in 30,000."""
ENDS = "superfluid_head_worker_ends_total"


def until(is_so: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"it did not come about in time: {what}"
        time.sleep(0.05)


@dataclass
class Heads:
    """A head of two workers with its files. `key` is what the test shows now."""

    head: Child
    key_file: Path
    nodes_file: Path
    policy_file: Path
    key: str

    def ask(self, path: str, key: str | None = None, seconds: float = 10.0) -> httpx.Response:
        """Ask over a connection of its own, which may come to either worker."""
        headers = {"authorization": f"Bearer {key or self.key}"}
        return httpx.get(self.head.url + path, headers=headers, timeout=seconds, trust_env=False)

    def all_say(self, key: str, status: int) -> bool:
        return all(self.ask("/v1/models", key).status_code == status for _ in range(ASKS))

    def nodes_seen(self) -> set[int]:
        return {len(self.ask("/v1/fleet").json()["nodes"]) for _ in range(ASKS)}

    def ends(self) -> dict[str, float]:
        lines = [line for line in self.ask("/metrics").text.splitlines() if line.startswith(ENDS)]
        return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}

    def is_whole(self) -> bool:
        try:
            page = self.ask("/metrics").text
            is_ready = all(self.ask("/readyz").status_code == 200 for _ in range(6))
        except httpx.HTTPError:
            return False
        return is_ready and "superfluid_head_workers 2.0" in page

    def said(self, words: str) -> int:
        return self.head.log_text().count(words)

    def workers(self) -> list[int]:
        """The processes that the parent forked; what those started is theirs."""
        children = Path(f"/proc/{self.head.pid}/task/{self.head.pid}/children")
        return [int(pid) for pid in children.read_text().split()]


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path_factory.mktemp("systemd"), WATCHDOG_S)
    yield made
    made.channel.close()


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, supervisor: Supervisor) -> Iterator[Heads]:
    folder = tmp_path_factory.mktemp("files")
    key_file, nodes, policy = folder / "api.key", folder / "nodes.toml", folder / "keys.json"
    key_file.write_text("the-first-key-of-all\n")
    key_file.chmod(0o600)
    policy.write_text(policy_of("a-named-key-for-app"))
    policy.chmod(0o600)
    with Rig() as rig:
        key = rig.make_key()
        node = rig.start_node("node-0", *FLAGS, "--mock-rates", "prefill=0,decode=25", key=key)
        rig.wait_ready(node)
        nodes.write_text(f'nodes = ["{node.listen}"]')
        flags = ("--api-key-file", str(key_file), "--key-policy", str(policy))
        with mock.patch.dict(os.environ, supervisor.environment()):
            head = rig.start_head("demo", "--workers", "2", *flags, nodes=[f"@{nodes}"], key=key)
        rig.wait_ready(head)
        made = Heads(head, key_file, nodes, policy, "the-first-key-of-all")
        until(made.is_whole, "both workers reach the node")
        yield made


def policy_of(secret: str) -> str:
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return json.dumps({"keys": [{"name": "app", "key_sha256": digest}]})


class Streams:
    """Answers that run, each read by a thread of its own."""

    def __init__(self, heads: Heads, count: int, tokens: int) -> None:
        self.ends: list[str] = []
        self._heads, self._tokens, self._key = heads, tokens, heads.key
        self._threads = [threading.Thread(target=self._read, args=(n,)) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        body = {
            "messages": [{"role": "user", "content": f"Count {number}"}],
            "max_tokens": self._tokens,
            "stream": True,
        }
        url = f"{self._heads.head.url}/v1/chat/completions"
        headers = {"authorization": f"Bearer {self._key}"}
        last = ""
        try:
            with httpx.stream(
                "POST", url, json=body, headers=headers, timeout=90, trust_env=False
            ) as reply:
                for line in reply.iter_lines():
                    last = line or last
        except httpx.HTTPError as error:
            last = type(error).__name__
        self.ends.append(last)

    def wait(self) -> list[str]:
        for thread in self._threads:
            thread.join(90)
        return self.ends


@contextmanager
def streaming(heads: Heads, tokens: int, count: int = 12) -> Iterator[Streams]:
    made = Streams(heads, count, tokens)
    try:
        until(lambda: heads.ask("/v1/fleet").json()["running"] == count, "all streams run")
        yield made
    finally:
        made.wait()


def hang_up(heads: Heads) -> None:
    os.kill(heads.head.pid, signal.SIGHUP)


def test_a_reload_reaches_every_worker_and_drops_no_stream(heads: Heads) -> None:
    with streaming(heads, 120) as streams:
        shares = [each["running"] for each in heads.ask("/v1/fleet").json()["workers"]]
        assert min(shares) > 0
        old, new = heads.key, "the-second-key-of-all"
        heads.key_file.write_text(new + "\n")
        heads.policy_file.write_text(policy_of("another-key-for-app"))
        hang_up(heads)
        until(lambda: heads.said("the API keys were read again") == 2, "two workers read keys")
        heads.key = new
        assert heads.all_say(new, 200)
        assert heads.all_say(old, 401)
        assert heads.all_say("another-key-for-app", 200)
        assert heads.all_say("a-named-key-for-app", 401)
        text = heads.nodes_file.read_text()
        heads.nodes_file.write_text(text.replace("]", ', "b=127.0.0.1:9"]'))
        hang_up(heads)
        until(lambda: heads.nodes_seen() == {2}, "both workers know the new node")
        heads.nodes_file.write_text(text)
        hang_up(heads)
        until(lambda: heads.nodes_seen() == {1}, "both workers have left it")
        assert streams.wait() == ["data: [DONE]"] * 12
    assert heads.ends() == {"died": 0, "hung": 0}


def test_a_bad_file_keeps_the_old_configuration_also_for_a_worker_that_comes_anew(
    heads: Heads,
) -> None:
    good = {path: path.read_text() for path in (heads.nodes_file, heads.policy_file)}
    try:
        for path in good:
            path.write_text("{ this is nothing")
        hang_up(heads)
        until(lambda: heads.said("the API keys stay as they were") == 2, "keys are kept")
        until(lambda: heads.said("the list of nodes stays as it was") == 2, "nodes are kept")
        assert heads.all_say(heads.key, 200)
        assert heads.nodes_seen() == {1}
        killed = heads.workers()[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: killed not in heads.workers(), "the worker is gone")
        until(heads.is_whole, "another one serves")
        assert heads.said("the configuration stays as it was") == 1
        assert heads.all_say(heads.key, 200), "what was kept is what was read last, not first"
        assert heads.all_say("the-first-key-of-all", 401)
        assert heads.ends() == {"died": 1, "hung": 0}
    finally:
        for path, text in good.items():
            path.write_text(text)


def is_there(pid: int) -> bool:
    """Whether a process lives; one that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_a_killed_worker_had_started_ends_with_it(heads: Heads) -> None:
    body = {
        "prompt": "word " * 60_000
    }  # longer than what threads take: a process of the worker's own
    url, headers = f"{heads.head.url}/tokenize", {"authorization": f"Bearer {heads.key}"}

    def worker_with_children() -> int | None:
        httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)
        return next((pid for pid in heads.workers() if len(tree(pid)) > 1), None)

    until(lambda: worker_with_children() is not None, "a worker has a process of its own")
    worker = worker_with_children()
    assert worker is not None
    started = tree(worker)[1:]
    os.kill(worker, signal.SIGKILL)
    until(lambda: not any(map(is_there, started)), "what it had started is gone")
    until(heads.is_whole, "another one serves")


class Listener:
    """Hears the supervisor's socket to the end; `fed` are the times at which the watchdog was fed."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.fed: list[float] = []
        self._supervisor = supervisor
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(10)

    def _listen(self) -> None:
        while not self._is_over.is_set():
            try:
                said: dict[str, Any] = self._supervisor.hear(0.2)
            except TimeoutError:
                continue
            if "WATCHDOG" in said:
                self.fed.append(time.monotonic())

    def gap_s(self, began: float) -> float:
        """The longest time without being fed since `began`."""
        times = [began, *(each for each in self.fed if each > began), time.monotonic()]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


def test_a_worker_that_hangs_is_replaced_while_the_other_serves(
    heads: Heads, supervisor: Supervisor
) -> None:
    before = heads.ends()
    frozen, other = heads.workers()
    with Listener(supervisor) as listener:
        began = time.monotonic()
        with streaming(heads, 150) as streams:
            os.kill(frozen, signal.SIGSTOP)
            until(lambda: heads.said("a worker hangs; it is ended") == 1, "the hang is noticed")
            noticed_s = time.monotonic() - began
            ends = streams.wait()
        assert noticed_s < WATCHDOG_S + 10
        until(heads.is_whole, "both serve again")
        assert listener.gap_s(began) < WATCHDOG_S, "systemd would have ended the service"
    assert 0 < ends.count("data: [DONE]") < len(ends), "the other worker's answers are whole"
    now = heads.workers()
    assert frozen not in now
    assert other in now
    assert heads.ends() == {**before, "hung": before["hung"] + 1}
    assert "cause=hung" in heads.head.log_text()


def test_a_parent_that_hangs_is_not_spoken_for_and_blames_nobody_when_it_goes_on(
    heads: Heads, supervisor: Supervisor
) -> None:
    before, workers = heads.ends(), heads.workers()
    with Listener(supervisor) as listener:
        until(lambda: bool(listener.fed), "the watchdog is fed")
        os.kill(heads.head.pid, signal.SIGSTOP)
        try:
            time.sleep(0.5)
            count = len(listener.fed)
            time.sleep(WATCHDOG_S / 2)
            assert len(listener.fed) == count, "nobody else feeds it"
            assert heads.ask("/readyz").status_code == 200, "workers serve on"
        finally:
            os.kill(heads.head.pid, signal.SIGCONT)
        until(lambda: len(listener.fed) > count, "it is fed again")
    assert heads.workers() == workers
    assert heads.ends() == before
