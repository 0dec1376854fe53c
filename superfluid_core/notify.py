"""Tells a service supervisor how the program does: systemd's notification datagrams, spoken by hand.

The socket's path comes from the caller (`NOTIFY_SOCKET`, read in config), abstract names begin with `@`. Without a path every
call is a no-op, so programs notify unconditionally. Nothing here may ever stop the program: a failure is False.
"""

from __future__ import annotations

import socket

READY = "READY=1"
STOPPING = "STOPPING=1"
RELOADING = "RELOADING=1"
WATCHDOG = "WATCHDOG=1"
STATE_BYTES_MAX = 2_048
STATUS_CHARS_MAX = 300


def status(text: str) -> str:
    """Make the assignment that sets the one-line status of the unit."""
    return "STATUS=" + text.replace("\n", " ")[:STATUS_CHARS_MAX]


def extend(ms: int) -> str:
    """Make the assignment that asks for so much more time, counted from now, to start or to stop."""
    return f"EXTEND_TIMEOUT_USEC={ms * 1_000}"


def notify(state: str, path: str | None) -> bool:
    """Send `state` (newline-separated assignments) to the supervisor's socket; False when nobody heard it."""
    if not path or path[0] not in "@/":
        return False
    data = state.encode()
    if len(data) > STATE_BYTES_MAX:
        return False
    address = "\0" + path[1:] if path[0] == "@" else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)
            channel.sendto(data, address)
    except (OSError, ValueError):
        return False
    return True


def watchdog_interval_ms(usec: str | None, watched_pid: str | None, pid: int) -> int | None:
    """How often to feed the watchdog (half its timeout), or None when it is off or watches another process."""
    if not usec or not usec.isascii() or not usec.isdigit() or int(usec) == 0:
        return None
    if watched_pid and watched_pid != str(pid):
        return None
    return max(1, int(usec) // 2_000)
