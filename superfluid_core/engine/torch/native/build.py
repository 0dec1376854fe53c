"""Builds the C++ sources once and keeps the library in the cache directory.

Owns the compiler call, the key and the lock; knows nothing of what the library does. The key is the hash of sources, flags and the
CPU's own features, so a directory that several machines share, or that an update finds, never gives the wrong code. A build that
fails or takes too long is a reason in words, never an error: everything has a path without it. The sources include nothing
of torch, which is why they are compiled in seconds and outlive its versions.

    <cache>/native/<key>.so     written under another name first, then moved
    <cache>/native/<key>.lock   held while somebody builds
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from superfluid_core.clock import SECOND, Clock
from superfluid_core.errors import SuperfluidError

SOURCES = Path(__file__).parent
ENTRY = "ops.cpp"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    *("-std=gnu++20", "-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fno-trapping-math", "-fPIC", "-shared", "-fopenmp", "-w"),
)
BUILD_S_MAX = 120
LOCK_S_MAX = 150
LOCK_POLL_S = 0.1
REASON_CHARS_MAX = 200


class NoNativeError(SuperfluidError):
    """There is no compiled library, and why."""


def cpu_features() -> str:
    """Describe what the compiler's -march=native depends on."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            lines = [line for line in file if line.startswith(("flags", "Features", "model name"))]
    except OSError:
        lines = []
    return "\n".join([platform.machine(), platform.processor(), *lines[:2]])


def build_key(sources: Path = SOURCES, flags: tuple[str, ...] = FLAGS) -> str:
    """Name of the library that these sources give on this machine."""
    digest = hashlib.sha256("\n".join((*flags, cpu_features())).encode())
    for path in sorted(sources.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


def library(cache: Path, clock: Clock) -> Path:
    """Find the built library, or build it. Raises NoNativeError."""
    try:
        folder = own_folder(cache / "native")
        path = folder / f"{build_key()}.so"
        if path.exists():
            return path
        with _locked(path.with_suffix(".lock"), clock):
            if not path.exists():
                _compile(path)
    except OSError as error:
        raise NoNativeError(f"{cache}: {error.strerror or error}") from None
    return path


def is_built(cache: Path) -> bool:
    """Whether `library` will find what it needs."""
    return (cache / "native" / f"{build_key()}.so").exists()


def own_folder(path: Path) -> Path:
    """Make a directory that nobody else may write to. What is loaded from it is run. Raises NoNativeError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "geteuid"):
        found = path.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise NoNativeError(f"{path} belongs to others, or others may write to it")
    return path


def _compile(path: Path) -> None:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoNativeError(f"no C++ compiler ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        draft = Path(folder) / path.name
        command = [compiler, *FLAGS, str(SOURCES / ENTRY), "-o", str(draft)]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=BUILD_S_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NoNativeError(f"the C++ compiler took more than {BUILD_S_MAX} s") from None
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            worst = next((line for line in said if "error" in line), said[0])
            raise NoNativeError(f"the C++ compiler failed: {worst[:REASON_CHARS_MAX]}")
        draft.replace(path)


@contextmanager
def _locked(path: Path, clock: Clock) -> Iterator[None]:
    """One builder at a time; a lock dies with its holder. Where there are no file locks, everybody builds."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    deadline_ns = clock.now_ns() + LOCK_S_MAX * SECOND
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.now_ns() > deadline_ns:
                    raise NoNativeError("another process builds and does not end") from None
                threading.Event().wait(LOCK_POLL_S)
        yield
