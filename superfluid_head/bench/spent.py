"""What a process has used so far: CPU of all its threads, and memory. Linux only: it reads /proc.

The scheduler's own account counts nanoseconds; where the kernel keeps none, the clock ticks of `stat` have to do.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from superfluid_core.clock import SECOND


def cpu_ns(pid: int) -> int:
    """CPU time of a process's threads that live."""
    tasks = Path(f"/proc/{pid}/task")
    total = 0
    try:
        for task in tasks.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    except FileNotFoundError:
        return 0
    return total or _ticks_ns(pid)


def _ticks_ns(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * SECOND // os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """Return a process and everything that descends from it."""
    found, at = [pid], 0
    while at < len(found):
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{found[at]}/task").iterdir():
                children = (task / "children").read_text(encoding="ascii").split()
                found += [int(child) for child in children]
        at += 1
    return found


def tree_cpu_ns(pid: int) -> int:
    return sum(cpu_ns(one) for one in tree(pid))


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()
