"""The product from HTTP to the engine in one process, and a fleet that loses the node of one session at a chosen token.

Two real nodes with the simulated engine, real links between them and the real head; only the reader's socket is left out. A
loss is the head's own verdict that a node is silent, given for one session at an exact place of its journal: what the node says
afterwards still arrives, and must be dropped. So a thousand cuts need no thousand processes.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx

from superfluid_core.clock import SystemClock
from superfluid_core.engine.base import Engine
from superfluid_core.grammar.compiler import Grammars, vocabulary_of
from superfluid_core.limits import FleetLimits
from superfluid_core.wire.messages import TokenRow, Tokens
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.fleet.fleet import Fleet, FleetOptions, NodeAddress
from superfluid_head.fleet.node import FleetNode, SessionMessage
from superfluid_head.fleet.stream import Generation
from superfluid_head.fleet.transitions import Loss, NodeLost
from superfluid_head.text.dialects.detect import DialectChoice
from tests.failover.rows import PREFILL, Row, script
from tests.unit.head_api.conftest import Bench
from tests.unit.noded.conftest import KEYS, TEXTS, serving

AT_ONCE = 24
LANES = 32
LIMITS = FleetLimits(
    moves_per_s=100_000, moves_burst=100_000, reprefills_per_node=64, faults_to_open=1_000_000
)


class CutFleet(Fleet):
    """A fleet that loses nodes for single sessions: after so many delivered tokens of a request's choice."""

    def __init__(self, options: FleetOptions) -> None:
        super().__init__(options, SystemClock(), random.Random(11))
        self.planned: dict[str, tuple[int, ...]] = {}
        self.cut: dict[tuple[str, int], int] = {}
        self.seeds: dict[tuple[str, int], int] = {}
        self.is_lying = False

    def generate(self, request: GenerationRequest) -> Generation:
        self.seeds[request.request_id, request.choice] = request.sampling.seed
        return super().generate(request)

    def heard(self, node: FleetNode, link: int, message: SessionMessage) -> None:
        if not isinstance(message, Tokens):
            super().heard(node, link, message)
            self._cut_if(message.session, message.epoch, PREFILL)
            return
        for row in message.rows:
            self._hear_row(node, link, row)

    def _hear_row(self, node: FleetNode, link: int, row: TokenRow) -> None:
        """Let the tokens before the cut through, lose the node, and then let the whole row come, stale."""
        place = self._next_cut(row.session, row.epoch)
        if place is not None and place <= row.first + len(row.ids):
            kept = max(0, place - row.first)
            if kept:
                ids = row.ids[:kept]
                if self.is_lying:  # a planted fault: the last word of a lost node is another one
                    ids = (*ids[:-1], ids[-1] ^ 1)
                part = replace(
                    row, ids=ids, logprobs=row.logprobs[:kept], finish=None, stop_id=None
                )
                super().heard(node, link, Tokens((part,)))
            self._cut_if(row.session, row.epoch, place)
        super().heard(node, link, Tokens((row,)))

    def _live(self, session: int, epoch: int) -> Generation | None:
        generation = self._runner.generations.get(session)
        if generation is None or generation.waiting.slot is None:
            return None
        return generation if generation.machine.journal.epoch == epoch else None

    def _next_cut(self, session: int, epoch: int) -> int | None:
        generation = self._live(session, epoch)
        if generation is None:
            return None
        request = generation.request
        planned = self.planned.get(request.request_id, ())
        done = self.cut.get((request.request_id, request.choice), 0)
        return planned[done] if done < len(planned) else None

    def _cut_if(self, session: int, epoch: int, place: int) -> None:
        generation = self._live(session, epoch)
        if generation is None or self._next_cut(session, epoch) != place:
            return
        key = (generation.request.request_id, generation.request.choice)
        self.cut[key] = self.cut.get(key, 0) + 1
        slot = generation.waiting.slot
        assert slot is not None
        self._runner.feed(generation, NodeLost(slot.link, Loss.SILENT))


@dataclass(frozen=True)
class Reply:
    """All of an answer that a client can see, but for its ids and times."""

    status: int
    choices: tuple[Any, ...]
    usage: Any
    error: Any = None
    is_done: bool = True


@dataclass
class Said:
    """A choice of a stream, put together."""

    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish: Any = None
    stop: Any = None
    others: list[Any] = field(default_factory=list)
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)


def reply_of(response: httpx.Response) -> Reply:
    """Read a reply of either mode."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return _streamed(response)
    body = response.json()
    if response.status_code != 200:
        return Reply(response.status_code, (), None, body["error"], is_done=False)
    raw = response.content.replace(body["id"].encode(), b"ID")
    raw = raw.replace(b'"created": %d' % body["created"], b'"created": T')
    raw = re.sub(rb'"cached_tokens": \d+', b'"cached_tokens": C', raw)
    return Reply(200, (raw,), counted(body["usage"]))


def counted(usage: Any) -> Any:
    """What a usage counts; what was cached is a fact of the place where a choice ran first, not of the answer."""
    if usage is None:
        return None
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def _streamed(response: httpx.Response) -> Reply:
    said: dict[int, Said] = {}
    usage = error = None
    is_done = False
    for line in response.text.splitlines():
        if not line.startswith("data: "):
            continue
        assert not is_done, "something after the end"
        if line == "data: [DONE]":
            is_done = True
            continue
        chunk = json.loads(line[6:])
        usage, error = chunk.get("usage") or usage, chunk.get("error") or error
        for choice in chunk.get("choices", ()):
            _fold(said.setdefault(choice["index"], Said()), choice)
    return Reply(response.status_code, tuple(sorted(said.items())), counted(usage), error, is_done)


def _fold(said: Said, choice: dict[str, Any]) -> None:
    delta = dict(choice["delta"])
    said.text += delta.pop("content", None) or ""
    delta.pop("role", None)
    said.reasoning += delta.pop("reasoning_content", None) or ""
    delta.pop("reasoning", None)
    for call in delta.pop("tool_calls", None) or ():
        # how a call is cut into chunks, and its id, differ from one run to the next
        name, arguments = said.calls.setdefault(call["index"], ["", ""])
        told = call["function"]
        said.calls[call["index"]] = [
            name + (told.get("name") or ""),
            arguments + (told.get("arguments") or ""),
        ]
    said.others += [value for value in delta.values() if value]
    said.logprobs += (choice.get("logprobs") or {}).get("content") or ()
    said.finish = choice["finish_reason"] or said.finish
    said.stop = choice.get("stop_reason") or said.stop


class Path:
    """A head over a `CutFleet`, to ask."""

    def __init__(self, bench: Bench, fleet: CutFleet) -> None:
        self.fleet = fleet
        self._asked = 0
        transport = httpx.ASGITransport(app=bench.app)
        self._client = httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8453", verify=False, trust_env=False
        )
        self._places = asyncio.Semaphore(AT_ONCE)

    async def ask(
        self, row: Row, number: int, cuts: Sequence[int] = (), **members: Any
    ) -> tuple[Reply, str]:
        """Ask, its nodes lost at `cuts`; the reply and the request's id. Nothing is shared in a cache."""
        self._asked += 1
        name = f"cut-{self._asked}"
        self.fleet.planned[name] = tuple(cuts)
        body = {"cache_salt": name, **row.body(number), **members}
        async with self._places:
            response = await self._client.post(
                "/v1/chat/completions", json=body, headers={"x-request-id": name}, timeout=50
            )
        return reply_of(response), name

    def cuts_of(self, name: str) -> int:
        """How often the choices of a request lost their nodes."""
        return sum(count for (request, _), count in self.fleet.cut.items() if request == name)

    async def close(self) -> None:
        await self._client.aclose()


def _is_idle(roster: Any) -> bool:
    return not roster.live


@asynccontextmanager
async def path(
    dialect: str = "none", engines: tuple[Engine | None, Engine | None] = (None, None)
) -> AsyncIterator[Path]:
    """Two nodes and a head, whose model writes calls and thoughts in `dialect`; everything ends with the context, and nothing may be held on the nodes then.

    The nodes run the scripted engine, or `engines`.
    """
    shape: dict[str, Any] = {"lanes": LANES, "blocks": 8_192, "text_fingerprint": "fake-text"}
    shape["grammars"] = Grammars(lambda: vocabulary_of(TEXTS, TEXTS.vocabulary))
    bench = Bench(dialects=DialectChoice(dialect))
    try:
        async with (
            serving(script(), flags={"identity": "node-a"}, engine=engines[0], **shape) as one,
            serving(script(), flags={"identity": "node-b"}, engine=engines[1], **shape) as two,
        ):
            addresses = tuple(
                NodeAddress("127.0.0.1", rig.port, f"n{n}") for n, rig in enumerate((one, two))
            )
            fleet = CutFleet(FleetOptions(addresses, "head-1", KEYS, fleet_limits=LIMITS))
            object.__setattr__(bench.head, "fleet", fleet)
            async with asyncio.TaskGroup() as group:
                running = group.create_task(fleet.run())
                asked = Path(bench, fleet)
                try:
                    assert await fleet.wait_ready(10)
                    yield asked
                    for rig in (one, two):
                        roster = rig.node.agent.roster
                        await rig.until(partial(_is_idle, roster))
                finally:
                    await asked.close()
                    running.cancel()
    finally:
        bench.workers.close()
