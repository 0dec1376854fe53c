"""The table of messages: number, sender, size, head fields, blob columns. One row a message, nothing else.

A field of the head and a column of the blob both become the attribute of the same name; `session` travels in the frame
header. Numbers below 0x80 must be known by both ends; a number is never used again for something else. A head nests at
most four deep by construction (PONG: map, status, rates, rate).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from superfluid_core.errors import ErrorCode
from superfluid_core.limits import WireLimits
from superfluid_core.session import Determinism, QosClass, SamplingParams
from superfluid_core.wire import kinds as k
from superfluid_core.wire import messages as m
from superfluid_core.wire import notes as n
from superfluid_core.wire.columns import (
    Column,
    Data,
    GrammarText,
    Hashes,
    Ids,
    LogprobRows,
    TokenRows,
)
from superfluid_core.wire.packed import PackedBias, PackedIds, PackedRates, PackedWords

TENANT_CHARS_MAX = 256
WEIGHT_MAX = 1_000
MODEL_CHARS_MAX = 256
BAD_WORD_IDS_MAX = 8 * 1024
SALT_BYTES_MAX = 256
EOS_IDS_MAX = 256
RATES_MAX = 256
ENGINES_MAX = 8
"""So many engines' rates always fit a STATUS."""
SESSION_ROWS_MAX = 64
"""So many rows of SESSIONS always fit a frame, whatever the tenants are called."""


FIXMAP = 0x80
FIXMAP_KEYS_MAX = 15
"""So many keys msgpack counts in the byte that begins a map."""


class Role(StrEnum):
    """Who speaks on a link. The node is always the server, whoever dialled."""

    HEAD = "head"
    NODE = "node"

    @property
    def other(self) -> Role:
        return Role.NODE if self is Role.HEAD else Role.HEAD


def _holds_map(kind: k.Kind) -> bool:
    """Whether there is a map in every value of this kind that is neither nil nor empty."""
    if isinstance(kind, k.Nilable | k.ListOf):
        return _holds_map(kind.kind)
    return isinstance(kind, k.Record) or (
        isinstance(kind, k.Row) and any(map(_holds_map, kind.kinds))
    )


@dataclass(frozen=True, slots=True)
class Spec:
    """How one message travels. `has_session`: it names a session in the header, else that is 0."""

    number: int
    shape: type[Any]
    senders: tuple[Role, ...]
    fields: Mapping[str, k.Kind]
    columns: Mapping[str, Column] = field(default_factory=dict)
    has_session: bool = False
    may_lack_session: bool = False
    body_bytes_max: int = 0
    layout: k.Layout = field(init=False, repr=False, compare=False)
    heads_fields: frozenset[str] = field(init=False)
    map_byte: int = field(init=False)
    """What a head begins with in which no key can come twice unnoticed: so many keys. -1: there is no such head."""
    listed: tuple[str, ...] = field(init=False)
    """Fields that hold no map only while they are empty."""

    def __post_init__(self) -> None:
        names = frozenset(self.fields) | frozenset(self.columns)
        holding = {name: kind for name, kind in self.fields.items() if _holds_map(kind)}
        is_flat = all(isinstance(kind, k.ListOf) for kind in holding.values())
        is_short = len(names) <= FIXMAP_KEYS_MAX
        object.__setattr__(self, "layout", k.Layout(self.fields))
        object.__setattr__(self, "heads_fields", names)
        object.__setattr__(self, "map_byte", FIXMAP + len(names) if is_flat and is_short else -1)
        object.__setattr__(self, "listed", tuple(holding))

    @property
    def name(self) -> str:
        return self.shape.__name__


@dataclass(frozen=True, slots=True)
class Schema:
    """Every message, by number and by class."""

    by_number: Mapping[int, Spec]
    by_shape: Mapping[type[Any], Spec]


_HEAD = (Role.HEAD,)
_NODE = (Role.NODE,)
_BOTH = (Role.HEAD, Role.NODE)

_U32 = k.UInt(k.U32_MAX)
_U64 = k.UInt(k.U64_MAX)
_COUNT = k.UInt(k.U32_MAX, low=1)
_IDENTITY = k.Text(64, k.IDENTITY, 1)
_MODEL = k.Text(MODEL_CHARS_MAX, chars_min=1)
_MARK = k.Text(128)
_RATE = k.Real(low=0.0)
_QOS = k.Rank(QosClass)
_CODE = k.Name(ErrorCode)
_ENGINE = k.UInt(ENGINES_MAX - 1)
_PIECE: Mapping[str, k.Kind] = {"request": _U64, "piece": _U32, "pieces": _COUNT}
_EPOCH: Mapping[str, k.Kind] = {"epoch": _U32}


_ENGINE_LOAD: Mapping[str, k.Kind] = {
    "lanes_busy": _U32,
    "lanes": _U32,
    "queued": _U32,
    "queued_tokens": _U64,
    "blocks_used": _U32,
    "blocks_cached": _U32,
    "blocks": _U32,
    "prefill_rate": _RATE,
    "decode_rates": PackedRates(RATES_MAX),
}


def _status() -> Mapping[str, k.Kind]:
    return {
        "stamp_ns": _U64,
        "steps": _U64,
        "lanes_busy": _U32,
        "lanes": _U32,
        "queued": k.Row((_U32, _U32, _U32, _U32)),
        "queued_tokens": _U64,
        "blocks_used": _U32,
        "blocks_cached": _U32,
        "blocks": _U32,
        "prefill_rate": _RATE,
        "decode_rates": k.ListOf(k.Row((_U32, _RATE)), RATES_MAX),
        "step_predicted_ms": _U32,
        "draining": k.Flag(),
        "engines": k.ListOf(k.Record(m.EngineLoad, _ENGINE_LOAD), ENGINES_MAX),
    }


def _sampling(limits: WireLimits) -> k.Kind:
    shares = k.Real(0.0, 1.0)
    return k.Record(
        SamplingParams,
        {
            "temperature": k.Real(low=0.0),
            "top_k": _U32,
            "top_p": shares,
            "min_p": shares,
            "seed": _U64,
            "presence_penalty": k.Real(),
            "frequency_penalty": k.Real(),
            "repetition_penalty": k.Real(low=1e-9),
            "logit_bias": PackedBias(limits.logit_bias_max),
            "allowed_token_ids": PackedIds(limits.allowed_ids_max),
            "bad_words": PackedWords(limits.bad_words_max, BAD_WORD_IDS_MAX),
            "logprobs": k.Nilable(k.UInt(limits.logprobs_max)),
        },
    )


def _handshake(limits: WireLimits) -> list[Spec]:
    features = k.ListOf(k.Text(64, k.FEATURE, 1), limits.features_max, is_set=True)
    prose = k.Prose(limits.text_chars_max)
    offer = k.Record(
        m.ModelOffer,
        {
            "name": _MODEL,
            "weights": _MARK,
            "text": _MARK,
            "dtype": k.Text(32),
            "build": _MARK,
            "vocabulary": _COUNT,
            "eos_ids": PackedIds(EOS_IDS_MAX),
            "window": _COUNT,
            "lanes": _COUNT,
            "block_tokens": _COUNT,
            "blocks": _U32,
            "engine": _ENGINE,
        },
    )
    hello: Mapping[str, k.Kind] = {"minor": k.UInt(255), "features": features, "head": _IDENTITY}
    welcome: Mapping[str, k.Kind] = {
        "minor": k.UInt(255),
        "features": features,
        "node": _IDENTITY,
        "boot": _IDENTITY,
        "models": k.ListOf(offer, limits.models_max),
        "stamp_ns": _U64,
        "determinism": k.Name(Determinism),
        "sessions_max": _COUNT,
        "lease_ttl_max_ms": _COUNT,
        "idle_timeout_ms": _COUNT,
        "salt": k.Octets(SALT_BYTES_MAX),
    }
    refuse: Mapping[str, k.Kind] = {
        "code": _CODE,
        "text": prose,
        "retry_after_ms": k.Nilable(_U32),
        "epoch": _U32,
    }
    status = k.Nilable(k.Record(m.Status, _status()))
    return [
        Spec(0x01, m.Hello, _HEAD, hello, body_bytes_max=limits.hello_bytes_max),
        Spec(0x02, m.Welcome, _NODE, welcome),
        Spec(0x03, m.Refuse, _NODE, refuse, has_session=True, may_lack_session=True),
        Spec(0x04, m.Goaway, _BOTH, {"reason": prose}),
        Spec(0x05, m.LinkError, _BOTH, {"code": _CODE, "text": prose}),
        Spec(0x06, m.Ping, _BOTH, {"nonce": _U64}),
        Spec(0x07, m.Pong, _BOTH, {"nonce": _U64, "status": status}),
    ]


def _open(limits: WireLimits) -> Spec:
    fields: Mapping[str, k.Kind] = {
        "epoch": _U32,
        "model": _MODEL,
        "max_output": _U32,
        "min_output": _U32,
        "sampling": _sampling(limits),
        "choice": _U32,
        "stop_ids": PackedIds(limits.stop_ids_max),
        "ignore_eos": k.Flag(),
        "qos": _QOS,
        "tenant": k.Text(TENANT_CHARS_MAX),
        "batch_invariant": k.Flag(),
        "cache_salt": k.Octets(SALT_BYTES_MAX),
        "lease_stamp_ns": _U64,
        "lease_ttl_ms": _COUNT,
        "deadline_ms": k.Nilable(_U32),
        "prompt_logprobs": k.Nilable(k.UInt(limits.logprobs_max)),
        "start_deadline_ms": k.Nilable(_COUNT),
        "weight": k.UInt(WEIGHT_MAX, low=1),
    }
    columns: Mapping[str, Column] = {
        "prompt": Ids(),
        "delivered": Ids(),
        "grammar": GrammarText(limits.grammar_bytes_max),
    }
    return Spec(
        0x10, m.Open, _HEAD, fields, columns, has_session=True, body_bytes_max=limits.open_bytes_max
    )


def _sessions(limits: WireLimits) -> list[Spec]:
    prose = k.Prose(limits.text_chars_max)
    rows = TokenRows(limits.token_rows_max, limits.logprobs_max)
    progress: Mapping[str, k.Kind] = {**_EPOCH, "done": _U32, "total": _U32, "cached": _U32}
    opened: Mapping[str, k.Kind] = {**_EPOCH, "cached": _U32, "position": _U32}
    closed: Mapping[str, k.Kind] = {
        **_EPOCH,
        "reason": k.Name(m.CloseReason),
        "code": k.Nilable(_CODE),
        "text": prose,
    }
    return [
        Spec(0x11, m.Opened, _NODE, opened, has_session=True),
        Spec(0x12, m.ProgressReport, _NODE, progress, has_session=True),
        Spec(0x13, m.Tokens, _NODE, {}, {"rows": rows}, body_bytes_max=limits.tokens_bytes_max),
        Spec(0x14, m.Closed, _NODE, closed, has_session=True),
        Spec(0x15, m.CancelSession, _HEAD, {**_EPOCH, "reason": prose}, has_session=True),
        Spec(0x16, m.SetClass, _HEAD, {**_EPOCH, "qos": _QOS}, has_session=True),
        Spec(0x17, m.Renew, _HEAD, {"stamp_ns": _U64}),
        Spec(0x18, m.Status, _NODE, _status()),
        Spec(0x19, m.DrainOrder, _HEAD, {"grace_ms": k.Nilable(_U32)}),
    ]


def _bulk(limits: WireLimits) -> list[Spec]:
    numbered = {"piece": _U32, "pieces": _COUNT}
    prefix: Mapping[str, k.Kind] = {
        "sequence": _U64,
        **numbered,
        "snapshot": k.Flag(),
        "engine": _ENGINE,
    }
    piece = Data(limits.file_piece_bytes)
    ask: Mapping[str, k.Kind] = {"request": _U64, "model": _MODEL, "name": k.Text(128, k.FILE_NAME)}
    embed: Mapping[str, k.Kind] = {"model": _MODEL, "pooling": k.Text(32, k.WORD)}
    logprobs = LogprobRows(limits.frame_bytes_max, limits.logprobs_max)
    row = k.Record(
        m.SessionRow,
        {
            "head": _IDENTITY,
            "session": _U64,
            "state": k.Text(32),
            "qos": _QOS,
            "tenant": k.Text(TENANT_CHARS_MAX),
            "prompt": _U32,
            "output": _U32,
        },
    )
    listing: Mapping[str, k.Kind] = {**_PIECE, "rows": k.ListOf(row, SESSION_ROWS_MAX)}
    return [
        Spec(
            0x20,
            m.Prefix,
            _NODE,
            prefix,
            {"added": Hashes(), "removed": Hashes()},
            body_bytes_max=limits.prefix_bytes_max,
        ),
        Spec(0x21, m.Pin, _HEAD, {"ttl_ms": _U32, "model": _MODEL}, {"hashes": Hashes()}),
        Spec(0x22, m.Unpin, _HEAD, {"model": _MODEL}, {"hashes": Hashes()}),
        Spec(0x23, m.FileAsk, _HEAD, ask),
        Spec(
            0x24,
            m.FilePiece,
            _NODE,
            {**_PIECE, "digest": k.Text(64, k.HEX_DIGEST)},
            {"data": piece},
        ),
        Spec(0x25, m.Embed, _HEAD, embed, {"ids": Ids()}, has_session=True),
        Spec(
            0x26,
            m.Embedded,
            _NODE,
            numbered,
            {"data": Data(limits.file_piece_bytes, multiple=4)},
            has_session=True,
        ),
        Spec(
            0x27,
            m.PromptLogprobs,
            _NODE,
            {**_EPOCH, "first": _U32},
            {"rows": logprobs},
            has_session=True,
        ),
        Spec(0x28, m.StatsAsk, _HEAD, {"request": _U64}),
        Spec(0x29, m.Stats, _NODE, _PIECE, {"data": piece}),
        Spec(0x2A, m.SessionsAsk, _HEAD, {"request": _U64}),
        Spec(0x2B, m.Sessions, _NODE, listing),
    ]


def _notes() -> list[Spec]:
    """List what a peer may not know: it skips these."""
    trace: Mapping[str, k.Kind] = {**_EPOCH, "context": k.Text(55, k.TRACEPARENT, 55)}
    timing: Mapping[str, k.Kind] = {**_EPOCH, "queued_us": _U64, "prefill_us": _U64}
    return [
        Spec(0x90, n.Trace, _HEAD, trace, has_session=True),
        Spec(0x91, n.Timing, _NODE, timing, has_session=True),
    ]


@lru_cache(maxsize=16)
def schema(limits: WireLimits) -> Schema:
    """Build the table under these limits."""
    specs = [*_handshake(limits), _open(limits), *_sessions(limits), *_bulk(limits), *_notes()]
    return Schema({spec.number: spec for spec in specs}, {spec.shape: spec for spec in specs})
