"""Between vocabularies: wire messages to what a generation's machine hears, its journal to an OPEN, its failures to exceptions.

No state and no decisions: so that the wire, the machine and the callers' errors can each change alone.
"""

from __future__ import annotations

from dataclasses import replace

from superfluid_core.clock import MS
from superfluid_core.errors import (
    CapacityError,
    ErrorCode,
    GenerationError,
    InvalidRequestError,
    SuperfluidError,
)
from superfluid_core.placement.policies import Refusal
from superfluid_core.placement.view import Load
from superfluid_core.session import QosClass
from superfluid_core.wire.messages import (
    Closed,
    EngineLoad,
    Open,
    Opened,
    ProgressReport,
    Refuse,
    Status,
    TokenRow,
)
from superfluid_head.fleet import transitions as t
from superfluid_head.fleet.codes import BUSY_CODES
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.fleet.journal import Journal
from superfluid_head.fleet.standing import Slot, Standing
from superfluid_head.fleet.stream import Generation

LEFT_MS_MAX = 2**32 - 1
INVALID_CODES = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ErrorCode.UNSUPPORTED,
        ErrorCode.INVALID_GRAMMAR,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.TEMPLATE_ERROR,
    }
)


def error_of(fail: t.Fail) -> SuperfluidError:
    """Make the exception that a caller sees for a failed generation."""
    if fail.code in INVALID_CODES:
        param = "model" if fail.code is ErrorCode.MODEL_NOT_FOUND else None
        return InvalidRequestError(fail.text, param=param, code=fail.code)
    if fail.code in BUSY_CODES or fail.code is ErrorCode.NO_WORKER:
        return CapacityError(fail.text, code=fail.code, retry_after_ms=fail.retry_after_ms)
    retryable = fail.code not in (ErrorCode.REQUEST_QUARANTINED, ErrorCode.GRAMMAR_REPLAY)
    return GenerationError(
        fail.text, code=fail.code, retryable=retryable, retry_after_ms=fail.retry_after_ms
    )


def placed_of(
    request: GenerationRequest, standing: Standing, key: str, max_output: int
) -> t.Placed:
    """Tell a machine of its place: a node as it is on the link that stands."""
    offer, stops = standing.offers[request.model], frozenset(request.stop_ids)
    return t.Placed(
        node=key,
        boot=standing.welcome.boot,
        link=standing.number,
        weights=offer.weights,
        vocabulary=offer.vocabulary,
        stop_ids=stops if request.ignore_eos else stops | frozenset(offer.eos_ids),
        max_output=max_output,
    )


def open_of(
    journal: Journal, slot: Slot, qos: QosClass, max_output: int, lease: tuple[int, int]
) -> Open:
    """Make the OPEN that resumes `journal` in `slot`; `lease` is (stamp in ns, ttl in ms)."""
    request = journal.request
    return Open(
        session=slot.session,
        epoch=slot.epoch,
        model=request.model,
        prompt=request.prompt,
        delivered=tuple(journal.ids),
        max_output=max_output,
        min_output=min(request.min_output, max_output),
        sampling=request.sampling,
        choice=request.choice,
        stop_ids=request.stop_ids,
        ignore_eos=request.ignore_eos,
        grammar=request.grammar,
        qos=qos,
        tenant=request.tenant,
        weight=request.weight,
        batch_invariant=request.batch_invariant,
        cache_salt=request.cache_salt,
        lease_stamp_ns=lease[0],
        lease_ttl_ms=lease[1],
    )


def with_deadlines(message: Open, journal: Journal, now_ns: int) -> Open:
    """Add what is left until the request's deadlines; one that has had a lane is not bound by that for its start."""
    request = journal.request
    start_by_ns = None if journal.has_started else request.start_by_ns
    if request.deadline_ns is None and start_by_ns is None:
        return message
    return replace(
        message,
        deadline_ms=_left_ms(request.deadline_ns, now_ns),
        start_deadline_ms=_left_ms(start_by_ns, now_ns),
    )


def _left_ms(until_ns: int | None, now_ns: int) -> int | None:
    """Return whole milliseconds, as the wire can say them."""
    return None if until_ns is None else min(max(1, (until_ns - now_ns) // MS), LEFT_MS_MAX)


def arrived_of(link: int, row: TokenRow) -> t.Arrived:
    return t.Arrived(link, row.epoch, row.first, row.ids, row.logprobs, row.finish, row.stop_id)


def input_of(link: int, message: Opened | ProgressReport | Closed | Refuse) -> t.NodeInput:
    match message:
        case Opened():
            return t.Acknowledged(link, message.epoch, message.cached)
        case ProgressReport():
            return t.Advanced(link, message.epoch, message.done, message.total, message.cached)
        case Closed():
            return t.ClosedByNode(link, message.epoch, message.reason, message.code, message.text)
        case Refuse():
            return t.RefusedByNode(
                link, message.epoch, message.code, message.text, message.retry_after_ms
            )


def too_long(generation: Generation, refusal: Refusal) -> t.Input:
    request = generation.request
    if generation.machine.journal.moves:
        return t.TooNarrow()
    text = (
        f"the prompt has {len(request.prompt)} tokens and asks for up to {request.max_output}; "
        f"the context window is {refusal.window} tokens"
    )
    return t.NotPlaced(ErrorCode.CONTEXT_LENGTH_EXCEEDED, text)


def wait_over(code: ErrorCode) -> str:
    if code is ErrorCode.NO_WORKER:
        return "no node that serves this model is up"
    return "waited too long for a free lane"


def loads_of(status: Status) -> tuple[Load, dict[int, Load]]:
    """Return the load of a node's first engine, and of those beside it by number."""
    engines = status.engines
    if not engines:
        return _load(status, sum(status.queued)), {}
    first, *others = (_load(each, each.queued) for each in engines)
    return first, dict(enumerate(others, 1))


def _load(part: Status | EngineLoad, queued: int) -> Load:
    return Load(
        part.lanes_busy,
        queued,
        part.queued_tokens,
        part.blocks_used,
        part.blocks,
        part.prefill_rate,
        part.decode_rates,
    )
