"""A fleet with traffic and a browser before it. `make dashboard` sets the variable that says where the browser's driver is.

Without it nothing here is collected: these tests take a minute. With it, they are skipped, with the reason, where there is no
Chromium, no driver or no axe-core.
"""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from superfluid_head.bench.rig import Child, Rig

FOLDER = os.environ.get("SUPERFLUID_TEST_BROWSER", "")
collect_ignore = [] if FOLDER else ["test_browser.py"]

KEY = "the-admin-key"
NODES = ("node-0", "node-1", "node-2")
NODE_FLAGS = (
    *("--model", "demo", "--engine", "mock", "--mock-rates", "prefill=3000,decode=25"),
    *("--mock-eos", "0", "--max-batch", "8", "--kv-blocks", "600"),
)
CLASSES = ("interactive", "agent", "agent", "agent", "completion", "background")
CLIENTS = 9
READY_S = 30
LONG_TOKENS = 4_000
HEADERS = {"authorization": f"Bearer {KEY}"}


class Fleet:
    """A head with a key, three nodes, and clients that keep asking."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.key_file = rig.folder / "api.key"
        self.key_file.write_text(KEY, encoding="utf-8")
        self.key_file.chmod(0o600)
        self.fleet_key = rig.make_key()
        nodes = [rig.start_node(name, *NODE_FLAGS, key=self.fleet_key) for name in NODES]
        rig.wait_ready(*nodes)
        self.listens = {node.name: node.listen for node in nodes}
        self.head = self.start_head()
        self.url = self.head.url
        self.stop = threading.Event()
        self.failures: list[str] = []
        self.model = str(self.get("/v1/models")["data"][0]["id"])
        for seed in range(CLIENTS):
            threading.Thread(target=self._ask, args=(random.Random(seed),), daemon=True).start()

    def start_head(self, http: str = "127.0.0.1:0") -> Child:
        flags = ("demo", "--api-key-file", str(self.key_file))
        listens = list(self.listens.values())
        head = self.rig.start_head(*flags, nodes=listens, key=self.fleet_key, http=http)
        self.rig.wait_ready(head)
        self.url = head.url
        for _ in range(READY_S * 10):
            if sum(node["is_up"] for node in self.get("/v1/fleet")["nodes"]) == self.running:
                return head
            self.rig.sleep(0.1)
        raise AssertionError(head.log_end())

    @property
    def running(self) -> int:
        return sum(self.rig.named(name).is_running for name in NODES)

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", headers=HEADERS, timeout=10, trust_env=False).json()

    def restart(self, name: str) -> None:
        node = self.rig.start_node(name, *NODE_FLAGS, key=self.fleet_key, listen=self.listens[name])
        self.rig.wait_ready(node)

    def long_session(self) -> str:
        """Begin an answer that goes on for minutes, and return its id."""
        heard: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._follow, args=(heard,), daemon=True).start()
        return heard.get(timeout=READY_S)

    def _follow(self, heard: queue.Queue[str]) -> None:
        body = self._body("Go on.", LONG_TOKENS)
        with (
            suppress(httpx.HTTPError),
            httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=body, headers=HEADERS) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: {") and heard.empty():
                    heard.put(str(json.loads(line[6:]).get("id")))
                if self.stop.is_set():
                    return

    def _body(self, words: str, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": words}]
        body = {"model": self.model, "max_tokens": tokens, "messages": messages}
        return {**body, "stream": True, "ignore_eos": True}

    def _ask(self, drawn: random.Random) -> None:
        while not self.stop.is_set():
            with suppress(httpx.HTTPError):
                self._ask_once(drawn)
            self.stop.wait(drawn.random() / 2)

    def _ask_once(self, drawn: random.Random) -> None:
        body = self._body("word " * drawn.randint(5, 300), drawn.randint(60, 400))
        headers = {**HEADERS, "x-superfluid-qos": drawn.choice(CLASSES)}
        with (
            httpx.Client(base_url=self.url, trust_env=False, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply,
        ):
            for line in reply.iter_lines():
                if '"error"' in line:
                    self.failures.append(line)
                if self.stop.is_set():
                    return


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    with Rig() as rig:
        made = Fleet(rig)
        yield made
        made.stop.set()


@pytest.fixture(scope="session")
def axe() -> str:
    path = Path(FOLDER) / "node_modules" / "axe-core" / "axe.min.js"
    if not path.exists():
        pytest.skip(f"no axe-core in {FOLDER}")
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    sys.path.insert(0, FOLDER)
    sync = pytest.importorskip("playwright.sync_api", reason=f"no playwright in {FOLDER}")
    with sync.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where screenshots go: SUPERFLUID_TEST_SHOTS, or a folder that nobody keeps."""
    named = os.environ.get("SUPERFLUID_TEST_SHOTS", "")
    folder = Path(named) if named else tmp_path_factory.mktemp("shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
