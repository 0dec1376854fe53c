"""How a recording spells things: shapes of effects and plans for digests, settings as plain values, stand-ins for ids.

Without content an id becomes a keyed hash of itself and of all ids before it: equal prefixes stay equal, which is all that
a scheduler can see, while neither words nor their frequencies can be read back. Pure, and no knowledge of lines or files.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from hashlib import blake2b
from typing import Any, TypeVar, get_type_hints

from superfluid_core.scheduler.plan import (
    Accepted,
    Effect,
    Emits,
    Finish,
    Interrupt,
    Progress,
    Reject,
    TickPlan,
)
from superfluid_core.session import QosClass, SessionKey, SessionSpec

STOP_BASE = 1 << 31
"""Stand-ins at and above this are stop ids of their session; all others are below."""

T = TypeVar("T")


# --- shapes and digests -----------------------------------------------------------------------------


def effect_shape(effect: Effect) -> tuple[Any, ...]:
    """Everything about an effect but token ids and log-probabilities."""
    match effect:
        case Accepted():
            return ("accepted", effect.key.session, effect.position, effect.cached_tokens)
        case Progress():
            return ("progress", effect.key.session, effect.done, effect.total, effect.cached)
        case Emits():
            return ("emits", [key.session for key in effect.keys], list(effect.indices))
        case Finish():
            code = None if effect.code is None else effect.code.value
            stops = effect.stop_id is not None
            return ("finish", effect.key.session, effect.reason.value, stops, code, effect.text)
        case Reject():
            hint = effect.retry_after_ms
            return ("reject", effect.key.session, effect.code.value, effect.text, hint)
        case Interrupt():
            return ("interrupt", effect.tick)


def plan_shape(plan: TickPlan | None) -> tuple[Any, ...]:
    """Everything about a plan but token ids."""
    if plan is None:
        return ("none",)
    lanes = [
        (
            *(each.lane, each.decoding, each.computed, len(each.inputs), each.grant),
            *(each.output_index, tuple(each.blocks)),
        )
        for each in plan.lanes
    ]
    starts = [(each.lane, each.spec.key.session, len(each.outputs)) for each in plan.starts]
    copies = [(each.source, each.target) for each in plan.copies]
    parks = [(each.ticket, each.blocks) for each in (*plan.park_out, *plan.park_in)]
    head = (plan.tick, plan.step_tokens, plan.batch_invariant, plan.frees, plan.park_drop)
    return ("plan", head, lanes, starts, copies, parks)


class Digest:
    """A running digest of shapes."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def absorb(self, shape: object) -> str:
        """Take one more in; returns a short form of everything so far."""
        self._hash.update(repr(shape).encode())
        return self._hash.hexdigest()[:8]

    def whole(self) -> str:
        return self._hash.hexdigest()


# --- settings as plain values -----------------------------------------------------------------------


def _plain(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return value


def plain_settings(value: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def restore_settings(kind: type[T], plain: Mapping[str, Any]) -> T:
    """Rebuild limits, rules or a pool; a name that this version does not know is refused."""
    hints = get_type_hints(kind)
    made: dict[str, Any] = {}
    for name, value in plain.items():
        hint = hints[name]
        if isinstance(hint, type) and issubclass(hint, Enum):
            made[name] = hint(value)
        elif isinstance(value, dict):
            made[name] = {QosClass(int(key)): int(item) for key, item in value.items()}
        elif isinstance(value, list):
            made[name] = tuple(tuple(each) for each in value)
        else:
            made[name] = value
    return kind(**made)


# --- stand-ins for ids ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Context:
    """Where a session's chain of hashes stands, and which ids end it."""

    chain: bytes
    stops: dict[int, int]


class StandIns:
    """Replaces ids and names by keyed hashes; with no salt everything stays as it is."""

    def __init__(self, salt: bytes | None) -> None:
        self._salt = salt
        self._contexts: dict[SessionKey, _Context] = {}

    def name(self, text: str) -> str:
        if self._salt is None:
            return text
        return blake2b(text.encode(), digest_size=6, key=self._salt).hexdigest()

    def salted(self, data: bytes) -> bytes:
        if self._salt is None or not data:
            return data
        return blake2b(data, digest_size=8, key=self._salt).digest()

    def open(self, spec: SessionSpec) -> tuple[list[int], list[int], list[int]]:
        """Return prompt, delivered and stop ids as they are written."""
        if self._salt is None:
            return [*spec.prompt], [*spec.delivered], sorted(spec.stop_ids)
        stops = {token: STOP_BASE + rank for rank, token in enumerate(sorted(spec.stop_ids))}
        context = _Context(b"", {})
        prompt = [self._next(context, token) for token in spec.prompt]
        context.stops = stops
        delivered = [self._next(context, token) for token in spec.delivered]
        self._contexts[spec.key] = context
        return prompt, delivered, sorted(stops.values())

    def output(self, key: SessionKey | None, token: int) -> int:
        """Return the next output id of a session as it is written."""
        if self._salt is None:
            return token
        context = None if key is None else self._contexts.get(key)
        return 0 if context is None else self._next(context, token)

    def close(self, key: SessionKey) -> None:
        self._contexts.pop(key, None)

    def _next(self, context: _Context, token: int) -> int:
        assert self._salt is not None
        data = context.chain + token.to_bytes(4, "little")
        context.chain = blake2b(data, digest_size=16, key=self._salt).digest()
        stop = context.stops.get(token)
        return int.from_bytes(context.chain[:4], "little") % STOP_BASE if stop is None else stop


def pack_ids(ids: Sequence[int]) -> str:
    return b64encode(array("I", ids).tobytes()).decode()


def unpack_ids(text: str) -> tuple[int, ...]:
    ids = array("I")
    ids.frombytes(b64decode(text, validate=True))
    return tuple(ids)
