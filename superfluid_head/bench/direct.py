"""A node without its head: how long an idle one takes from an OPEN to the first token, heard on a link of the bench's own."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from superfluid_core.clock import MS, Clock
from superfluid_core.limits import LinkLimits
from superfluid_core.link.addresses import parse_address
from superfluid_core.link.dial import dial
from superfluid_core.link.keys import load_keys
from superfluid_core.link.link import Link
from superfluid_core.session import QosClass, SamplingParams
from superfluid_core.wire.messages import MINOR, Hello, Open, Tokens, Welcome
from superfluid_head.bench.rig import RigError

WAIT_S = 30.0
PAUSE_S = 0.05


async def first_tokens_ms(
    listen: str, key: Path, prompt: tuple[int, ...], count: int, clock: Clock
) -> list[float]:
    """Ask a node `count` times, one after the other, for one token. Raises RigError when it refuses."""
    host, port = parse_address(listen, 0)
    link = await dial(
        host,
        port,
        keys=load_keys(key),
        hello=Hello(MINOR, (), "bench"),
        limits=LinkLimits(),
        clock=clock,
    )
    try:
        async with asyncio.timeout(WAIT_S):
            sessions = [1 + secrets.randbits(62) for _ in range(count)]  # a node keeps old ones
            return [await _first_ms(link, session, prompt, clock) for session in sessions]
    except TimeoutError:
        raise RigError("the node did not answer in time") from None
    finally:
        await link.close("measured")


async def _first_ms(link: Link, session: int, prompt: tuple[int, ...], clock: Clock) -> float:
    welcome = link.peer
    assert isinstance(welcome, Welcome), "dialled as a head"
    await asyncio.sleep(PAUSE_S)
    asked = Open(
        session=session, epoch=1, model=welcome.models[0].name, prompt=prompt, delivered=(),
        max_output=1, min_output=0, sampling=SamplingParams(temperature=0.0), choice=0, stop_ids=(),
        ignore_eos=True, grammar=None, qos=QosClass.AGENT, tenant="bench", batch_invariant=False,
        cache_salt=session.to_bytes(8, "little"), lease_stamp_ns=welcome.stamp_ns,
        lease_ttl_ms=welcome.lease_ttl_max_ms,
    )  # fmt: skip
    began_ns = clock.now_ns()
    link.send(asked)
    while True:
        message = await link.receive()
        if isinstance(message, Tokens) and any(row.session == session for row in message.rows):
            return (clock.now_ns() - began_ns) / MS
        if getattr(message, "session", 0) == session and type(message).__name__ == "Refuse":
            raise RigError(f"the node refused: {message}")
