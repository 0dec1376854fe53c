"""A head over a scripted fleet: byte-level vocabulary, dictated answers, everything else is the product."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace, TracebackType
from typing import Any

import httpx
import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.engine.scores import best_of
from superfluid_core.engine.stand_ins import hashed_scores, hashed_vector
from superfluid_core.errors import InvalidRequestError, SuperfluidError
from superfluid_core.limits import HttpLimits
from superfluid_core.session import FinishReason, QosClass, TokenLogprobs
from superfluid_head.access.keys import KeyRing
from superfluid_head.api.inflight import Inflight
from superfluid_head.api.state import Head
from superfluid_head.app import build_app
from superfluid_head.fleet.chronicle import Chronicle, Listener, PlacementRecord
from superfluid_head.fleet.embeds import EmbedRequest
from superfluid_head.fleet.events import (
    EndEvent,
    GenerationEvent,
    GenerationRequest,
    ProgressEvent,
    TokensEvent,
)
from superfluid_head.fleet.health import NodeState
from superfluid_head.fleet.pins import PinnedPrefix, PrefixPin
from superfluid_head.fleet.standing import Counters
from superfluid_head.fleet.stream import Taker
from superfluid_head.metrics import HeadMetrics
from superfluid_head.text.chat import ModelText, TextWorkers
from superfluid_head.text.dialects.detect import DialectChoice

EOS = 256
SEPARATOR = 257
WINDOW = 4_096


def fleet_node(*, is_ready: bool) -> NodeState:
    """A node that is up, or cannot be reached."""
    return NodeState(
        name="n1", address="10.0.0.1:8454", is_up=is_ready, state="up" if is_ready else "down",
        detail="" if is_ready else "refused", boot="b", models=("org/m",), lanes=4, lanes_busy=3, queued=2,
        sessions=5, blocks=100, blocks_used=7, prefill_rate=0.0, circuit="closed", is_draining=False,
        link="joined", links=2, key="7f3a91c2", link_age_s=7_300, rekeys=1,
    )  # fmt: skip


def fleet_snapshot(*, is_ready: bool) -> dict[str, Any]:
    """How a fleet of one node stands that is up, or cannot be reached."""
    node = fleet_node(is_ready=is_ready)
    return {
        "ready": is_ready, "policy": "load-aware", "nodes": [asdict(node)], "models": [], "waiting": (0, 1, 0, 0),
        "running": 6, "counters": asdict(Counters(placements=9, moves=1, joins=2, rekeys=1, join_refusals=3)),
    }  # fmt: skip


class FakeTokenizer:
    """Ids below 256 are bytes, then two specials, then pieces as they are asked for."""

    vocabulary = 1_000
    special_ids = frozenset({EOS, SEPARATOR})
    eos_ids = (EOS,)
    adds_bos = False
    bos_id: int | None = None
    puts_leading_space = False

    def __init__(self) -> None:
        self.pieces = [bytes([byte]) for byte in range(256)] + [b"<|im_end|>", b"<|sep|>"]

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    def token_id(self, literal: str) -> int | None:
        data = literal.encode()
        return self.pieces.index(data) if data in self.pieces else None

    def piece(self, data: str | bytes) -> int:
        raw = data.encode() if isinstance(data, str) else data
        if raw not in self.pieces:
            self.pieces.append(raw)
        return self.pieces.index(raw)

    def encode(self, text: str, *, allow_special: bool, add_bos: bool = False) -> list[int]:
        return list(text.encode())

    def encode_batch(
        self, texts: Sequence[str], *, allow_special: bool, add_bos: bool = False
    ) -> list[list[int]]:
        coded = [list(text.encode()) for text in texts]
        if allow_special:
            mark, data = SEPARATOR, list(b"<|sep|>")
            for ids in coded:
                while (at := _place(ids, data)) is not None:
                    ids[at : at + len(data)] = [mark]
        return coded


def _place(ids: list[int], data: list[int]) -> int | None:
    places = range(len(ids) - len(data) + 1)
    return next((at for at in places if ids[at : at + len(data)] == data), None)


class FakeTemplate:
    """Role, content, separator."""

    source = tools_source = ""

    def render(self, messages: Sequence[Any], **options: Any) -> Any:
        if any("refuse me" in str(message["content"]) for message in messages):
            from superfluid_core.errors import ErrorCode

            raise InvalidRequestError(
                "no such roles", param="messages", code=ErrorCode.TEMPLATE_ERROR
            )
        ids: list[int] = []
        for message in messages:
            ids += [*f"{message['role']}:{message['content']}".encode(), SEPARATOR]
        if not options["add_generation_prompt"] and ids:
            ids.pop()
        return SimpleNamespace(encode=lambda tokenizer: ids)


class FakeGeneration:
    """Plays its fleet's script for one choice."""

    def __init__(self, fleet: FakeFleet, request: GenerationRequest) -> None:
        self.fleet = fleet
        self.request = request
        self._events = self._play()
        self._stop_at: int | None = None
        self._taker: Taker = lambda _ids, _logprobs: False
        self.node = self.last_node = "n1"

    async def __aenter__(self) -> FakeGeneration:
        self.fleet.running += 1
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.fleet.running -= 1
        if kind is asyncio.CancelledError:
            self.fleet.cancelled_ns.append(time.monotonic_ns())
        await self._events.aclose()  # type: ignore[attr-defined]

    def __aiter__(self) -> FakeGeneration:
        return self

    async def __anext__(self) -> GenerationEvent:
        return await self._events.__anext__()

    def offer(self, taker: Taker) -> None:
        self._taker = taker

    def set_class(self, qos: QosClass) -> None:
        self.fleet.classes.append(qos)

    def stop(self, count: int) -> None:
        self._stop_at = count
        self.fleet.stops.append(count)

    async def _play(self) -> AsyncIterator[GenerationEvent]:
        script, request = self.fleet.script, self.request
        await asyncio.sleep(script.wait_s)
        if script.error_first is not None:
            raise script.error_first
        yield ProgressEvent(len(request.prompt), len(request.prompt), script.cached)
        ends = set(request.stop_ids) | (set() if request.ignore_eos else {EOS})
        sent = 0
        while True:
            for step in script.steps:
                await asyncio.sleep(script.step_s)
                for token in step:
                    logprobs = TokenLogprobs(-0.5, ((token, -0.5), (65, -1.0), (66, float("-inf"))))
                    wanted = request.sampling.logprobs is not None
                    event = TokensEvent(sent, (token,), (logprobs,) if wanted else ())
                    if not self._taker(event.ids, event.logprobs):
                        yield event
                    sent += 1
                    if self._stop_at is not None:
                        yield EndEvent(FinishReason.STOP, None, script.cached, 0)
                        return
                    if token in ends:
                        yield EndEvent(FinishReason.STOP, token, script.cached, 0)
                        return
                    if sent == request.max_output:
                        yield EndEvent(FinishReason.LENGTH, None, script.cached, 0)
                        return
            if script.error_last is not None:
                raise script.error_last


@dataclass
class Script:
    """What the fleet answers. The steps repeat until a stop id or the budget ends the generation."""

    steps: list[list[int]] = field(default_factory=list)
    wait_s: float = 0.0
    step_s: float = 0.0
    cached: int = 3
    error_first: SuperfluidError | None = None
    error_last: SuperfluidError | None = None


class FakeFleet:
    """The door of a fleet of one model."""

    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self.tokenizer = tokenizer
        self.script = Script()
        self.requests: list[GenerationRequest] = []
        self.embeds: list[EmbedRequest] = []
        self.stops: list[int] = []
        self.classes: list[QosClass] = []
        self.pins: list[PrefixPin] = []
        self.unpinned: list[PinnedPrefix] = []
        self.stats: dict[str, Any] = {"n1": {"scheduler": {"lanes": 4, "queued": {"agent": 2}}}}
        self.drains: list[tuple[str, int | None]] = []
        self.placements: dict[str, list[PlacementRecord]] = {}
        self.cancelled_ns: list[int] = []
        self.chronicle = Chronicle(SystemClock(), {})
        self.running = 0
        self.is_ready = True
        self.served = [
            SimpleNamespace(
                name="org/m", window=WINDOW, is_up=True, text="fake-text", eos_ids=(EOS,)
            )
        ]

    def say(self, *pieces: str | bytes | int, end: bool = True, **script: Any) -> None:
        ids = [p if isinstance(p, int) else self.tokenizer.piece(p) for p in pieces]
        steps = [[token] for token in ids] + ([[EOS]] if end else [])
        self.script = Script(steps, **script)

    def generate(self, request: GenerationRequest) -> FakeGeneration:
        self.requests.append(request)
        return FakeGeneration(self, request)

    def waiting_by_class(self) -> Sequence[int]:
        return (0, 1, 2, 3)

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        links = {"joined": 4, "rekeyed": 5, "relinked": 6, "dial refused": 7, "join refused": 8}
        return {"link_events": links, "fleet_events": {"failed": 2}}

    async def node_stats(self, name: str) -> bytes:
        if name not in self.stats:
            raise InvalidRequestError("no such node")
        if isinstance(self.stats[name], SuperfluidError):
            raise self.stats[name]
        return json.dumps(self.stats[name]).encode()

    async def embed(self, wanted: EmbedRequest) -> bytes:
        self.embeds.append(wanted)
        await asyncio.sleep(self.script.wait_s)
        if self.script.error_first is not None:
            raise self.script.error_first
        best = best_of(wanted.pooling)
        if best is not None:
            return hashed_scores(wanted.ids, best, 0, self.tokenizer.vocabulary)
        return hashed_vector(wanted.ids, wanted.pooling, 0)

    async def pin_prefix(self, pin: PrefixPin) -> PinnedPrefix:
        self.pins.append(pin)
        return PinnedPrefix(pin.node, pin.model, (b"n" * 16,), 16)

    def unpin_prefix(self, pinned: PinnedPrefix) -> None:
        self.unpinned.append(pinned)

    def models(self) -> Sequence[Any]:
        return self.served

    def snapshot(self) -> dict[str, Any]:
        return fleet_snapshot(is_ready=self.is_ready)

    def why(self, request_id: str) -> Sequence[PlacementRecord]:
        return self.placements.get(request_id, [])

    def events(self, *, since: int | None = None) -> contextlib.AbstractContextManager[Listener]:
        return self.chronicle.listen(since=since)

    def drain(self, name: str, grace_ms: int | None = None) -> None:
        self._told(name)
        self.drains.append((name, grace_ms))
        self.chronicle.tell("drain", node=name)

    def undrain(self, name: str) -> None:
        self._told(name)
        self.drains = [each for each in self.drains if each[0] != name]
        self.chronicle.tell("undrain", node=name)

    def _told(self, name: str) -> None:
        if name not in self.stats:
            raise InvalidRequestError("no such node")

    def health(self) -> Any:
        return SimpleNamespace(is_ready=self.is_ready, nodes=[fleet_node(is_ready=self.is_ready)])


class Bench:
    """A head under test."""

    def __init__(
        self,
        keys: KeyRing | None = None,
        limits: HttpLimits | None = None,
        *,
        template: Any = FakeTemplate,
        dialects: DialectChoice | None = None,
        **parts: Any,
    ) -> None:
        self.tokenizer = FakeTokenizer()
        self.fleet = FakeFleet(self.tokenizer)
        self.fleet.say("Hello", " world")
        text = SimpleNamespace(
            files={},
            tokenizer=lambda: self.tokenizer,
            template=template,
            fingerprint=lambda: "fake-text",
            config=SimpleNamespace(window=WINDOW, eos_ids=(EOS,)),
        )
        self.limits = limits or HttpLimits()
        self.workers = TextWorkers(self.limits)
        metrics = HeadMetrics()
        self.head = Head(
            fleet=self.fleet,
            texts=[ModelText("m", text, self.workers, dialects)],  # type: ignore[arg-type]
            keys=keys or KeyRing(),
            metrics=metrics,
            inflight=Inflight(metrics),
            clock=SystemClock(),
            limits=self.limits,
            created_s=1_700_000_000,
            version="9.9",
            **parts,
        )
        self.app = build_app(self.head, frozenset({8453}))

    async def asend(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8453", verify=False, trust_env=False
        ) as client:
            return await client.request(method, path, timeout=20, **options)

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self.asend(method, path, **options))

    def chat(self, **members: Any) -> httpx.Response:
        return self.send("POST", "/v1/chat/completions", json=chat_body(**members))

    def complete(self, **members: Any) -> httpx.Response:
        body = {"model": "org/m", "prompt": "hi", **members}
        return self.send("POST", "/v1/completions", json=body)

    def raw_chat(self, content: bytes, **headers: str) -> httpx.Response:
        return self.send(
            "POST",
            "/v1/chat/completions",
            content=content,
            headers={"content-type": "application/json", **headers},
        )


def chat_body(**members: Any) -> dict[str, Any]:
    return {"model": "org/m", "messages": [{"role": "user", "content": "hi"}], **members}


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.workers.close()


@pytest.fixture
def make_bench() -> Iterator[Any]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for one in made:
        one.workers.close()


class LiveServer:
    """The bench behind a real uvicorn on loopback, in a thread."""

    def __init__(self, bench: Bench, host: str = "127.0.0.1") -> None:
        self.bench = bench
        self.host = host
        self.port = 0
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Any = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        from superfluid_head.server import http_server, open_sockets

        sockets = open_sockets([(self.host, 0)])
        self.port = sockets[0].getsockname()[1]
        app = build_app(self.bench.head, frozenset({self.port}))
        self._server = http_server(app, self.bench.limits)
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._ready.set)
        await self._server.serve(sockets=sockets)

    def call(self, function: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._ready.wait(10)
        for _ in range(200):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/livez", trust_env=False).status_code == 200:
                    break
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def live() -> Iterator[LiveServer]:
    bench = Bench()
    with LiveServer(bench) as server:
        yield server
    bench.workers.close()


@pytest.fixture
def serve() -> Any:
    """Puts a bench of one's own behind a socket."""
    return LiveServer
