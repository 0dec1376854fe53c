"""What closes, and what must not be left behind by it."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from superfluid_core.errors import ErrorCode
from superfluid_core.link.causes import Stage, why_dial_failed, why_join_failed, why_unresolved


def test_a_listener_that_closes_leaves_no_descriptor_watched_for_the_next_connection(
    make_fleet: Any,
) -> None:
    """The next socket gets the number of the one just closed; watched still, its connect failed with ENOENT."""

    async def connect(port: int, failures: list[OSError]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(40):
            with socket.socket() as made:
                made.setblocking(False)
                try:
                    await loop.sock_connect(made, ("127.0.0.1", port))
                except OSError as error:
                    failures.append(error)

    async def main() -> list[OSError]:
        failures: list[OSError] = []
        async with make_fleet(None).serving() as stays:
            for _ in range(3):
                async with make_fleet(None).serving() as goes:
                    for _ in range(8):
                        await goes.listener.start("127.0.0.1", 0)
                    await asyncio.sleep(0)
                    await goes.listener.close()
                    await asyncio.gather(*(connect(stays.port, failures) for _ in range(4)))
        return failures

    assert asyncio.run(main()) == []


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "x"), "a fault of this process", ErrorCode.INTERNAL),
        (OSError(errno.ENETUNREACH, "Connect call failed ('10.0.0.1', 1)"),
         "cannot connect: Network is unreachable", ErrorCode.NO_WORKER),
        (OSError(errno.EMFILE, "x"), "cannot connect: Too many open files", ErrorCode.NO_WORKER),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "connection refused", ErrorCode.NO_WORKER),
        (TimeoutError(), "timed out", ErrorCode.TIMEOUT),
    ],
)  # fmt: skip
def test_a_failure_to_connect_is_told_by_its_number_and_our_own_faults_as_ours(
    error: OSError, words: str, code: ErrorCode
) -> None:
    for told in (
        why_dial_failed(error, None, Stage.CONNECT),
        why_join_failed(error, Stage.CONNECT, has_key=True),
    ):
        assert told[0].startswith(words)
        assert told[1] is code


def test_a_number_that_comes_in_the_handshake_is_not_called_a_failure_to_connect() -> None:
    told, _ = why_dial_failed(OSError(errno.EIO, "x"), None)
    assert told == "the connection broke in the handshake: Input/output error"


def test_a_name_that_cannot_be_resolved_now_is_not_called_unknown() -> None:
    assert why_unresolved(socket.gaierror(socket.EAI_NONAME, "x")) == "no such name"
    busy = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert why_unresolved(busy) == "Temporary failure in name resolution"
    assert why_unresolved(TimeoutError()) == "timed out"
