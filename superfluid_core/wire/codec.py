"""Messages to frames and back, by the table in `schema.py`.

`decode` raises RemoteProtocolError for whatever a peer may have sent, `encode` LocalProtocolError for a message that the
peer would have to refuse; neither raises anything else. msgpack is always read in one shot, with its own limits, without
extension types or timestamps; a key that appears twice is a breach, and so is a key or a type that the table does not know.
"""

from __future__ import annotations

from typing import Any

import msgpack

from superfluid_core.errors import LocalProtocolError, RemoteProtocolError
from superfluid_core.limits import WireLimits
from superfluid_core.wire.columns import Cursor
from superfluid_core.wire.frames import Frame, Header, pack_frame
from superfluid_core.wire.kinds import BreachError, judge_keys
from superfluid_core.wire.messages import (
    Embedded,
    FilePiece,
    Message,
    Open,
    Prefix,
    PromptLogprobs,
    Sessions,
    Stats,
    Tokens,
)
from superfluid_core.wire.schema import Spec, schema

DEFAULT_LIMITS = WireLimits()
_ARRAY_MAX = 1024
_MAP_MAX = 64
_STRINGS = frozenset({str})
_PIECED = frozenset({FilePiece, Embedded, Stats, Sessions, Prefix})
_PACK = msgpack.Packer(use_bin_type=True).pack
"""One packer for all heads: its buffer is larger than the heads of an hour, and nothing runs between its beginning and its end."""


def encode(message: Message, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    """Make the whole frame. Raises LocalProtocolError when the message breaks the schema or a size limit."""
    return encode_as(schema(limits).by_shape[type(message)], message, limits)


def encode_as(spec: Spec, message: Message, limits: WireLimits) -> bytes:
    """Do the same for who has looked up its spec: hashing the limits costs more than a small message."""
    try:
        head, blob = _pack(spec, message)
    except (BreachError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise LocalProtocolError(f"cannot send {spec.name}: {error}") from None
    session = message.session if spec.has_session else 0  # type: ignore[union-attr] # by the table
    if type(session) is not int or not session_is_right(spec, session):
        raise LocalProtocolError(f"cannot send {spec.name}: the session number is not right")
    if len(head) > limits.head_bytes_max:
        raise LocalProtocolError(f"cannot send {spec.name}: its head has {len(head)} bytes")
    if len(head) + len(blob) > body_bytes_max(spec, limits):
        raise LocalProtocolError(f"cannot send {spec.name}: it has {len(head) + len(blob)} bytes")
    return pack_frame(spec.number, session, head, blob)


def decode(frame: Frame, limits: WireLimits = DEFAULT_LIMITS) -> Message:
    """Read the message in a frame whose header was judged. Raises RemoteProtocolError."""
    spec = schema(limits).by_number.get(frame.header.type)
    if spec is None:
        raise RemoteProtocolError(f"unknown frame type {frame.header.type:#04x}")
    return decode_as(spec, frame)


def decode_as(spec: Spec, frame: Frame) -> Message:
    """Do the same for who has looked up its spec."""
    try:
        message = _build(spec, frame)
        _check_pieces(message)
    except BreachError as breach:
        raise RemoteProtocolError(f"bad {spec.name}: {breach}") from None
    return message


def body_bytes_max(spec: Spec, limits: WireLimits) -> int:
    return spec.body_bytes_max or limits.frame_bytes_max


def session_is_right(spec: Spec, session: int) -> bool:
    """Whether the header may carry this session number with this message."""
    if session == 0:
        return not spec.has_session or spec.may_lack_session
    return spec.has_session and 0 < session < 2**64


def judge_size(header: Header, limits: WireLimits) -> Spec | None:
    """Find the message's spec, or None for an optional type to skip. Raises RemoteProtocolError.

    Looks at nothing but the header: no byte of the body has been kept yet.
    """
    return judge_size_as(schema(limits).by_number.get(header.type), header, limits)


def judge_size_as(spec: Spec | None, header: Header, limits: WireLimits) -> Spec | None:
    """Do the same for who has looked up the spec."""
    if header.flags != 0:
        raise RemoteProtocolError("unknown frame flags")
    if spec is None and header.type < 0x80:
        raise RemoteProtocolError(f"unknown frame type {header.type:#04x}")
    bytes_max = (spec is not None and spec.body_bytes_max) or limits.frame_bytes_max
    if header.body_bytes > bytes_max:
        text = f"{_name(spec)} of {header.body_bytes} bytes; at most {bytes_max}"
        raise RemoteProtocolError(text)
    if header.head_bytes > min(header.body_bytes, limits.head_bytes_max):
        text = f"{_name(spec)}: a head of {header.head_bytes} bytes does not fit"
        raise RemoteProtocolError(text)
    if spec is not None and not session_is_right(spec, header.session):
        raise RemoteProtocolError(f"{_name(spec)}: the session number is not right")
    return spec


def _name(spec: Spec | None) -> str:
    return "an optional frame" if spec is None else spec.name


def estimate_bytes(message: Message) -> int:
    """About what the message takes on the wire; cheap, for bounding a queue."""
    match message:
        case Tokens(rows):
            return 64 * len(rows) + sum(
                [4 * len(row.ids) + 280 * len(row.logprobs) for row in rows]
            )
        case Open():
            grammar = 0 if message.grammar is None else len(message.grammar.text)
            return 2048 + 4 * (len(message.prompt) + len(message.delivered)) + grammar
        case Prefix():
            return 128 + 16 * (len(message.added) + len(message.removed))
        case FilePiece() | Stats() | Embedded():
            return 256 + len(message.data)
        case PromptLogprobs() | Sessions():
            return 128 + 300 * len(message.rows)
        case _:
            return 512


# --- inside ---------------------------------------------------------------------------------------


def _pack(spec: Spec, message: Message) -> tuple[bytes, bytes]:
    _check_pieces(message)
    raw = spec.layout.write(message)
    parts = []
    for name, column in spec.columns.items():
        try:
            raw[name], packed = column.write(getattr(message, name))
        except BreachError as breach:
            raise BreachError(f"{name} {breach}") from None
        parts.append(packed)
    return _PACK(raw), b"".join(parts)


def _build(spec: Spec, frame: Frame) -> Message:
    raw = _unpack_plain(spec, frame.head)
    if raw is None:
        raw = _unpack_head(frame.head)
        judge_keys(raw, {**spec.fields, **spec.columns})
    spec.layout.read(raw)
    if spec.columns:
        name, cursor = "", Cursor(frame.blob)
        try:
            for name, column in spec.columns.items():
                raw[name] = column.read(raw[name], cursor)
        except BreachError as breach:
            raise BreachError(f"{name} {breach}") from None
        cursor.finish()
    elif frame.blob:
        raise BreachError("leaves bytes of the blob unread")
    if spec.has_session:
        raw["session"] = frame.header.session
    message: Message = spec.shape(**raw)
    return message


def _unpack_plain(spec: Spec, head: bytes) -> dict[str, Any] | None:
    """Unpack a head whose keys need no look one by one, as nearly all are: all are there, no more were said, and none is in a map within.

    None when it is another one, or a bad one: `_unpack_head` says which.
    """
    if not head or head[0] != spec.map_byte:
        return None
    try:
        raw: dict[str, Any] = msgpack.unpackb(
            head,
            ext_hook=_refuse_ext,
            max_array_len=_ARRAY_MAX,
            max_map_len=_MAP_MAX,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return None
    if raw.keys() != spec.heads_fields or (spec.listed and any(map(raw.get, spec.listed))):
        return None
    return raw


def _unpack_head(head: bytes) -> dict[str, Any]:
    try:
        raw = msgpack.unpackb(
            head,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_map_of,
            ext_hook=_refuse_ext,
            max_str_len=len(head),
            max_bin_len=len(head),
            max_array_len=_ARRAY_MAX,
            max_map_len=_MAP_MAX,
            max_ext_len=0,
        )
    except BreachError:
        raise
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        raise BreachError("its head is no acceptable msgpack") from None
    if type(raw) is not dict:
        raise BreachError("its head is no map")
    return raw


def _map_of(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = dict(pairs)
    if len(found) != len(pairs):
        raise BreachError("has a key twice")
    if not _STRINGS.issuperset(map(type, found)):
        raise BreachError("has a key that is no string")
    return found


def _refuse_ext(_code: int, _data: bytes) -> Any:
    raise BreachError("uses an extension type")


def _check_pieces(message: Message) -> None:
    if type(message) in _PIECED and message.piece >= message.pieces:  # type: ignore[union-attr] # by the table
        raise BreachError("piece is not below pieces")
