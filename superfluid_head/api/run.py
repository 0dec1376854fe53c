"""One accepted request, whatever its route: its id, its counts, its session, its one line in the log.

Owns what every generating endpoint has in common: who asks (`Caller`), what runs (`Prepared`), what is counted (`Tally`) and the
run of all choices (`Run.follow`). It must not know the shape of a body or of a reply: chat and completions make their chunks
and their whole answers from the same `ChoiceEvent`s, so the two modes of a route, and the routes, cannot disagree in usage or finish.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from superfluid_core.clock import MS, SECOND
from superfluid_core.errors import SuperfluidError
from superfluid_core.logs import log
from superfluid_core.session import Grammar, QosClass, SamplingParams
from superfluid_core.tracing.context import SPAN
from superfluid_head.access.keys import Principal
from superfluid_head.api.choices import (
    ChoiceEvent,
    Emit,
    Ended,
    Stage,
    Started,
    Teller,
    Text,
    run_choices,
)
from superfluid_head.api.inflight import Hold
from superfluid_head.api.qos import Service, client_of
from superfluid_head.api.schemas.chat import SamplingMembers
from superfluid_head.api.sessions import LiveSession
from superfluid_head.api.spans import trace_id
from superfluid_head.api.sse import EventStream, TextTemplate
from superfluid_head.api.state import Head, Target
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.text.channel import Channel, ChannelOptions
from superfluid_head.text.chat import ModelText
from superfluid_head.text.delta import Delta
from superfluid_head.text.detokenizer import Detokenizer
from superfluid_head.text.speech import Speech

_logger = logging.getLogger("superfluid_head.access")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and as what it is served."""

    principal: Principal
    request_id: str
    service: Service


def judge_caller(head: Head, request: Request, default: QosClass | None = None) -> Caller:
    """Judge who asks, and as what it is to be served. Raises ApiError or CapacityError."""
    state = request.scope["state"]
    principal: Principal = state["principal"]
    client = client_of(principal, request.client.host if request.client else None)
    service = head.qos.judge(request.headers, principal, client, head.clock.now_ns(), default)
    return Caller(principal, state["request_id"], service)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that nothing can refuse any more but the fleet. `requests` has one entry per choice of each prompt."""

    target: Target
    text: ModelText
    caller: Caller
    requests: tuple[GenerationRequest, ...]
    prompt_tokens: int
    is_streamed: bool


def template_of(
    head: Head,
    caller: Caller,
    target: Target,
    body: SamplingMembers,
    sampling: SamplingParams,
    grammar: Grammar | None,
) -> GenerationRequest:
    """Make what all choices of a request have in common; prompt, budget and choice are still to be filled in."""
    principal, service = caller.principal, caller.service
    return GenerationRequest(
        request_id=caller.request_id,
        model=target.name,
        prompt=(),
        sampling=sampling,
        max_output=0,
        min_output=body.min_tokens,
        stop_ids=tuple(sorted(set(body.stop_token_ids or ()))),
        ignore_eos=body.ignore_eos,
        qos=service.qos,
        tenant=principal.name,
        batch_invariant=service.batch_invariant,
        weight=principal.weight,
        cache_salt=head.prefix_salt(principal.name, body.cache_salt),
        grammar=grammar,
        start_by_ns=service.start_by_ns,
    )


def channels_of(
    prepared: Prepared, body: SamplingMembers, *, keep_tokens: bool, speech: Speech | None = None
) -> list[Channel]:
    """Make the way back of every choice: its stop strings, its hidden ids, its text, and how that is to be read."""
    speech = speech or Speech()
    text, ends = prepared.text, prepared.target.eos_ids
    return [
        Channel(
            Detokenizer(
                text.tokenizer.token_bytes,
                text.tokenizer.special_ids,
                skip_special=body.skip_special_tokens,
            ),
            ChannelOptions(
                stops=tuple(body.stop or ()),
                stop_ids=frozenset(request.stop_ids) | (frozenset() if body.ignore_eos else ends),
                min_tokens=body.min_tokens,
                include_stop=body.include_stop_str_in_output,
                keep_tokens=keep_tokens,
                marker_ids=frozenset(speech.marker_ids.values()),
                calls_max=speech.calls_max,
            ),
            speech.reader(),
        )
        for request in prepared.requests
    ]


@dataclass(slots=True)
class Tally:
    """The counts of one request, for its usage, its headers and its log line."""

    began_ns: int
    counts: dict[int, int] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    first_ns: int | None = None
    cached: int = 0
    moves: int = 0
    node: str | None = None
    queued_ms: int | None = None
    thoughts: dict[int, int] | None = None
    """Tokens of reasoning by choice; None for a model that does not reason."""

    def note(self, happened: ChoiceEvent, now_ns: int) -> None:
        match happened:
            case Text():
                self._count(happened)
                self.first_ns = self.first_ns or now_ns
            case Ended():
                self._count(happened)
                self.finishes[happened.choice] = happened.finish
                self.cached = max(self.cached, happened.cached)
                self.moves += happened.moves
                self.queued_ms = max(self.queued_ms or 0, happened.queued_ms)
            case Started():
                pass

    def _count(self, happened: Text | Ended) -> None:
        self.counts[happened.choice] = happened.count
        if self.thoughts is not None:
            self.thoughts[happened.choice] = happened.reasoning

    def usage(self, prompt: int) -> dict[str, Any]:
        completion = sum(self.counts.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min(self.cached, prompt)},
        }
        if self.thoughts is not None:
            thoughts = sum(self.thoughts.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return usage


class Run:
    """Follows the choices of one request to their ends."""

    def __init__(self, head: Head, prepared: Prepared, kind: str, prefix: str) -> None:
        self.head = head
        self.prepared = prepared
        self.tally = Tally(head.clock.now_ns())
        self.id = prefix + secrets.token_hex(12)
        self.created = head.clock.wall_s()
        self._kind = kind

    def note(self, happened: ChoiceEvent) -> None:
        tally = self.tally
        if type(happened) is Text and tally.first_ns and tally.thoughts is None:
            tally.counts[happened.choice] = happened.count
        else:
            tally.note(happened, tally.first_ns or self.head.clock.now_ns())

    def usage(self) -> dict[str, Any]:
        return self.tally.usage(self.prepared.prompt_tokens)

    def headers(self) -> dict[str, str]:
        """Headers of a reply that is not streamed."""
        headers = {"x-superfluid-warm": str(min(self.tally.cached, self.prepared.prompt_tokens))}
        if self.head.debug_headers:
            headers["x-superfluid-moves"] = str(self.tally.moves)
            if self.tally.node is not None:
                headers["x-superfluid-node"] = self.tally.node
        return headers

    async def follow(
        self, channels: Sequence[Channel], emit: Emit, teller: Teller | None = None
    ) -> None:
        """Run the choices; whatever happens, one log line says how it went. With `teller` text takes the short way when it can."""
        head, principal = self.head, self.prepared.caller.principal
        status: str | int = 499
        others = max(0, len(self.prepared.requests) - 1)  # the gate holds the first one's slot
        try:
            with head.quotas.hold(principal, others):
                async with head.inflight.hold() as held:
                    with head.sessions.enter(self._session(held)) as session:
                        doors = (session.attach, self._leaving(session))
                        if principal.tokens_per_minute:
                            teller = None  # each piece is charged on its way
                        stage = Stage(head.fleet, head.metrics, head.clock, *doors, teller)
                        noted = self._charging(emit)
                        await run_choices(stage, self.prepared.requests, channels, noted)
            status = 200
        except SuperfluidError as error:
            status = error.code.value
            raise
        finally:
            self._report(status)

    def _leaving(self, session: LiveSession) -> Callable[[int], None]:
        """Note where a choice ended when it leaves the session."""

        def detach(choice: int) -> None:
            door = session.doors.get(choice)
            self.tally.node = self.tally.node if door is None else door.last_node
            session.detach(choice)

        return detach

    def _charging(self, emit: Emit) -> Emit:
        """Charge the caller's tokens as they are used: the prompt when the fleet takes it, then what comes of each choice."""
        if not self.prepared.caller.principal.tokens_per_minute:
            return emit
        charged: dict[int, int] = {}

        async def emit_charged(happened: ChoiceEvent) -> None:
            used = 0 if charged else self.prepared.prompt_tokens
            count = 0 if isinstance(happened, Started) else happened.count
            used += count - charged.get(happened.choice, 0)
            charged[happened.choice] = count
            head, principal = self.head, self.prepared.caller.principal
            head.quotas.charge(principal, used, head.clock.now_ns())
            await emit(happened)

        return emit_charged

    def _session(self, held: Hold) -> LiveSession:
        prepared = self.prepared
        return LiveSession(
            id=self.id,
            request_id=prepared.caller.request_id,
            model=prepared.target.name,
            tenant=prepared.caller.principal.name,
            qos=prepared.caller.service.qos,
            batch_invariant=prepared.caller.service.batch_invariant,
            prompt_tokens=prepared.prompt_tokens,
            created_s=self.created,
            is_streamed=prepared.is_streamed,
            completion_tokens=lambda: sum(self.tally.counts.values()),
            cancel=held.cancel,
        )

    def _report(self, status: str | int) -> None:
        tally, prepared = self.tally, self.prepared
        completion = sum(tally.counts.values())
        self.head.metrics.tokens(
            (prepared.target.name, prepared.caller.principal.name),
            prompt=prepared.prompt_tokens,
            cached=tally.cached,
            completion=completion,
        )
        if not _logger.isEnabledFor(logging.INFO):
            return
        fields: dict[str, Any] = {
            "request_id": prepared.caller.request_id,
            "status": status,
            "model": prepared.target.name,
            "class": prepared.caller.service.qos.label,
            "tenant": prepared.caller.principal.name,
            "stream": prepared.is_streamed,
            "prompt": prepared.prompt_tokens,
            "cached": tally.cached,
            "completion": completion,
            **self._durations(),
            "moves": tally.moves,
            "finish": ",".join(sorted(set(tally.finishes.values()))) or None,
        }
        span = SPAN.get()
        log(_logger, "info", self._kind, **fields, **({"trace": trace_id(span)} if span else {}))

    def _durations(self) -> dict[str, int | float | None]:
        """Say how long it took and how fast it was: tokens a second of the prompt's computed part, and of the answer."""
        tally, now_ns = self.tally, self.head.clock.now_ns()
        found: dict[str, int | float | None] = {
            "queue_ms": tally.queued_ms,
            "ttft_ms": None,
            "prompt_rate": None,
            "rate": None,
            "total_ms": (now_ns - tally.began_ns) // MS,
        }
        if tally.first_ns is not None:
            first_ns, later_ns = tally.first_ns - tally.began_ns, now_ns - tally.first_ns
            computed = self.prepared.prompt_tokens - tally.cached
            working_ns = first_ns - (tally.queued_ms or 0) * MS
            later = sum(tally.counts.values()) - len(tally.counts)
            found["ttft_ms"] = first_ns // MS
            found["prompt_rate"] = _rate(computed, working_ns)
            found["rate"] = _rate(later, later_ns)
        return found


class ShortWay:
    """A Teller into a stream: `told` makes the events of some text, or nothing.

    `templates` holds, by choice, what makes the event of plain words; a choice has one once `told` was given some, if its
    events tell nothing else.
    """

    __slots__ = ("_counts", "_note", "_templates", "_told", "_write", "is_ready")

    def __init__(
        self,
        stream: EventStream,
        run: Run,
        told: Callable[[Text], bytes],
        templates: dict[int, TextTemplate],
    ) -> None:
        self.is_ready = stream.is_ready
        self._write = stream.write
        self._note = run.note
        self._told = told
        self._counts = run.tally.counts
        self._templates = templates

    def tell(self, text: Text) -> None:
        self._note(text)
        data = self._told(text)
        if data:
            self._write(data)

    def tell_words(self, choice: int, words: str, count: int, ids: tuple[int, ...]) -> None:
        template = self._templates.get(choice)
        if template is None:
            self.tell(Text(choice, Delta(words), count, ids))
            return
        self._counts[choice] = count
        self._write(template.event(words))


def _rate(tokens: int, elapsed_ns: int) -> float | None:
    """Return tokens a second; None for what took no time."""
    return round(tokens * SECOND / elapsed_ns, 1) if tokens > 0 and elapsed_ns > 0 else None
