"""The place of a chaos run: a head, mock nodes, and a chaos proxy in front of each node; real processes on loopback.

Owns how the processes are put together, wrapped and brought back, and the faults that are done to whole processes. It
must not know what is measured. Everything here blocks; asynchronous callers go through `asyncio.to_thread`.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from superfluid_core.link.tls import write_key_file
from superfluid_head.bench.pages import page
from superfluid_head.bench.rig import Child, Rig, program
from superfluid_head.bench.small_fleet import metric, wait_linked
from tests.chaos.proxy import ChaosProxy, Taps

MOCK = ("--engine", "mock", "--model", "demo", "--mock-eos", "0", "--max-batch", "48")
Wrap = Callable[[list[str]], list[str]]


def rates(decode: int, prefill: int = 20_000) -> tuple[str, ...]:
    return ("--mock-rates", f"prefill={prefill},decode={decode}")


def in_shell(script: str) -> Wrap:
    """Run `script` in a shell of the child's own, which then becomes the program ("$@")."""
    return lambda command: ["sh", "-c", script, "sh", *command]


def in_unshare(*flags: str) -> Wrap:
    return lambda command: ["unshare", *flags, *command]


def can_unshare(*flags: str) -> bool:
    """Whether this user may make such namespaces here."""
    try:
        done = subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def patched(module: str, *arguments: str) -> Wrap:
    """Run the program in an interpreter that first has `tests/chaos/<module>` change what it must."""
    script = str(Path(__file__).with_name(module))
    return lambda command: [sys.executable, script, *arguments, "--", *command]


@dataclass(frozen=True, slots=True)
class Setup:
    """What differs from three plain nodes. `wraps` by process name change how it is started."""

    nodes: int = 3
    flags: tuple[str, ...] = (*MOCK, *rates(25))
    head_flags: tuple[str, ...] = ()
    wraps: Mapping[str, Wrap] = field(default_factory=dict)
    has_key: bool = True
    taps: Mapping[str, Taps] = field(default_factory=dict)


class Site:
    """Use it as a context manager. `names` are the nodes; the head dials their proxies."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rig = Rig()
        self.wraps = dict(setup.wraps)
        self.proxies: dict[str, ChaosProxy] = {}
        self.addresses: dict[str, str] = {}
        self.served = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.rig.close()
        for proxy in self.proxies.values():
            proxy.close()

    def _start(self) -> None:
        self.key: Path | None = None
        if self.setup.has_key:
            self.key = self.rig.folder / "fleet.key"
            write_key_file(self.key)
        started = [self.begin_node(f"node-{n}") for n in range(self.setup.nodes)]
        self.rig.wait_ready(*started)
        self.addresses = {child.name: child.listen for child in started}
        for name, address in self.addresses.items():
            self.proxies[name] = ChaosProxy(address, self.setup.taps.get(name))
        self.start_head()

    @property
    def names(self) -> list[str]:
        return list(self.addresses)

    @property
    def head(self) -> Child:
        return self.rig.named("head")

    @property
    def url(self) -> str:
        return self.head.url

    def node(self, name: str) -> Child:
        return self.rig.named(name)

    # --- processes ----------------------------------------------------------------------------

    def begin_node(self, name: str) -> Child:
        """Start a node where it was, or on a free port; does not wait."""
        auth = ["--auth-file", str(self.key)] if self.key else ["--insecure-no-auth"]
        listen = self.addresses.get(name, "127.0.0.1:0")
        command = [*program("superfluid-noded"), "--identity", name, "--listen", listen]
        return self._spawn(name, [*command, *auth, *self.setup.flags])

    def start_head(self) -> None:
        """Start the head, wait until it reaches every node."""
        auth = ["--fleet-auth", str(self.key)] if self.key else ["--insecure-no-auth"]
        fleet = ",".join(proxy.address for proxy in self.proxies.values())
        command = [*program("superfluid"), "serve", "demo", "--http", "127.0.0.1:0"]
        child = self._spawn("head", [*command, "--fleet", fleet, *auth, *self.setup.head_flags])
        self.rig.wait_ready(child)
        self.wait_linked()
        listed = self.ask("/v1/models")
        self.served = str(listed["data"][0]["id"])

    def _spawn(self, name: str, command: list[str]) -> Child:
        wrap = self.wraps.get(name)
        return self.rig.spawn(name, command if wrap is None else wrap(command))

    def restart(self, *names: str) -> None:
        """Bring nodes back where they were and wait until the head reaches every node."""
        self.rig.wait_ready(*[self.begin_node(name) for name in names])
        self.wait_linked()

    def kill(self, name: str) -> None:
        self.node(name).signal(signal.SIGKILL)

    def stop(self, name: str, timeout_s: float = 40.0) -> int:
        """SIGTERM, and wait for the end; returns the exit status."""
        child = self.node(name)
        child.signal(signal.SIGTERM)
        return child.process.wait(timeout=timeout_s)

    def reap(self, name: str) -> None:
        self.node(name).process.wait(timeout=10)

    # --- questions ----------------------------------------------------------------------------

    def wait_linked(self, count: int | None = None) -> None:
        wait_linked(self.rig, self.head, self.setup.nodes if count is None else count)

    def ask(self, path: str) -> Any:
        return page(self.url + path).json()

    def node_metric(self, name: str, metric_name: str) -> float:
        host, port = self.node(name).ready["metrics"]
        return sum(metric(f"http://{host}:{port}", metric_name))

    def busy(self, name: str) -> float:
        """Lanes of a node that hold a session."""
        states = ("prefilling", "decoding")
        return sum(
            self.node_metric(name, f'superfluid_lanes{{state="{state}"}}') for state in states
        )


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
