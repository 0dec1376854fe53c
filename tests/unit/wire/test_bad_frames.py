"""Whatever a peer sends, the answer is RemoteProtocolError or a message: never another exception."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.errors import RemoteProtocolError
from superfluid_core.limits import WireLimits
from superfluid_core.session import TokenLogprobs
from superfluid_core.wire import codec, kinds
from superfluid_core.wire import messages as m
from superfluid_core.wire.connection import Connection
from superfluid_core.wire.frames import HEADER, HEADER_BYTES, Frame, FrameBuffer
from superfluid_core.wire.schema import Role, schema

LIMITS = WireLimits()
SCHEMA = schema(LIMITS)
HELLO = m.Hello(0, (), "h")
NAN, INF = float("nan"), float("inf")


def receiver_of(message: m.Message, examples: dict[str, Any]) -> Connection:
    """The end that would get this message, in the state in which it may come."""
    sender = SCHEMA.by_shape[type(message)].senders[0]
    connection = Connection(sender.other)
    if isinstance(message, m.Hello):
        return connection
    if sender is Role.HEAD:
        connection.receive_data(codec.encode(HELLO), 0)
        assert connection.next_event() == HELLO
        connection.send(examples["Welcome"])
        return connection
    connection.send(HELLO)
    is_handshake = isinstance(message, m.Welcome) or (
        isinstance(message, m.Refuse) and not message.session
    )
    if not is_handshake:
        connection.receive_data(codec.encode(examples["Welcome"]), 0)
        connection.next_event()
    return connection


def outcome(connection: Connection, data: bytes) -> m.Message | None:
    """The first event of these bytes; None for a breach. Anything else that is raised fails the test."""
    connection.receive_data(data, 1)
    try:
        event = connection.next_event()
    except RemoteProtocolError as breach:
        if not 0 < len(breach.message) < 300:
            raise AssertionError(breach.message) from breach
        return None
    assert event is not None
    return event


def frame_with(data: bytes, head: bytes, *, blob: bytes | None = None) -> bytes:
    """The frame `data` with another head (and blob)."""
    body, number, flags, head_bytes, session = HEADER.unpack_from(data)
    old = data[HEADER_BYTES + head_bytes : HEADER_BYTES + body]
    blob = old if blob is None else blob
    return HEADER.pack(len(head) + len(blob), number, flags, len(head), session) + head + blob


def head_of(data: bytes) -> dict[str, Any]:
    head_bytes = HEADER.unpack_from(data)[3]
    head: dict[str, Any] = msgpack.unpackb(data[HEADER_BYTES : HEADER_BYTES + head_bytes])
    return head


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field and element in a head."""
    entries: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in entries:
        yield (*prefix, key)
        if isinstance(inner, dict | list):
            yield from paths(inner, (*prefix, key))


def get(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with `new` at `path`; `new` may be _MISSING."""
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    if len(path) > 1:
        copy[path[0]] = changed(copy[path[0]], path[1:], new)
    elif new is _MISSING:
        del copy[path[0]]
    else:
        copy[path[0]] = new
    return copy


_MISSING = object()
ALWAYS_WRONG = {
    "negative": -1,
    "very negative": -(2**63),
    "NaN": NAN,
    "infinity": INF,
    "minus infinity": -INF,
    "map": {"a": 1},
    "maps in arrays": [{}, [{}]],
    "deep": [[[[[[[[1]]]]]]]],
    "long text": "x" * 5000,
    "extension": msgpack.ExtType(5, b"abcd"),
    "timestamp": msgpack.Timestamp(1, 2),
    "empty extension": msgpack.ExtType(1, b""),
}
SOMETIMES_WRONG = {
    "nil": None,
    "true": True,
    "zero": 0,
    "2**32": 2**32,
    "2**63": 2**63,
    "2**64-1": 2**64 - 1,
    "float": 1.5,
    "empty text": "",
    "text": "é\x00\u2028",
    "bytes": b"\xff\xfe\xfd",
    "empty bytes": b"",
    "empty array": [],
    "array of nil": [None],
}


def may_be_nil(path: tuple[Any, ...], shape: type[Any], old: Any) -> bool:
    spec = SCHEMA.by_shape[shape]
    is_nilable = isinstance(spec.fields.get(path[-1]), kinds.Nilable) or path[-1] == "logprobs"
    return old is None or is_nilable or path[0] == "rows" or path == ("grammar",)


def test_each_field_with_each_bad_value_is_a_breach(example: Any, examples: dict[str, Any]) -> None:
    data = codec.encode(example)
    head = head_of(data)
    tried = 0
    for path in paths(head):
        for name, value in ALWAYS_WRONG.items():
            bad = frame_with(data, msgpack.packb(changed(head, path, value)))
            assert outcome(receiver_of(example, examples), bad) is None, (path, name)
            tried += 1
        for name, value in SOMETIMES_WRONG.items():
            bad = frame_with(data, msgpack.packb(changed(head, path, value)))
            event = outcome(receiver_of(example, examples), bad)
            old = get(head, path)
            if value is True and type(old) is not bool:
                assert event is None, (path, name)
            if value is None and not may_be_nil(path, type(example), old):
                assert event is None, (path, name)
            if event is not None:
                assert type(value) is type(old) or old is None or value is None, (path, name)
                codec.encode(event)  # what was let in is a message that we could have sent
            tried += 1
    assert tried >= 25 or not head


def test_a_missing_an_extra_and_a_doubled_key_are_breaches(
    example: Any, examples: dict[str, Any]
) -> None:
    data = codec.encode(example)
    head = head_of(data)
    for path in paths(head):
        if isinstance(path[-1], str):
            bad = frame_with(data, msgpack.packb(changed(head, path, _MISSING)))
            assert outcome(receiver_of(example, examples), bad) is None, path
    maps = [(), *(path for path in paths(head) if isinstance(get(head, path), dict))]
    for path in maps:
        for extra in ("zzz", "", b"bytes", 5, None, 1.5, "Session"):
            larger = changed(head, (*path, extra), 1)
            bad = frame_with(data, msgpack.packb(larger))
            assert outcome(receiver_of(example, examples), bad) is None, (path, extra)
    for key, value in head.items():
        packer = msgpack.Packer()
        doubled = packer.pack_map_pairs([*head.items(), (key, value)])
        assert outcome(receiver_of(example, examples), frame_with(data, doubled)) is None, key


NO_MAPS = [
    b"",
    b"\xc0",
    b"\x90",
    b"\x01",
    b"\x80\x80",
    b"\xc1",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x91" * 2000,
    b"\x81" * 2000,
    b"\x81\x91\x01\x01",
    b"\x81\xa1\xff\x01",
    b"\x81\x80\x01",
    b"\xd6\xff\x00\x00\x00\x00",
    b"\xc7\x00\xff",
    b"\xc7\x0c\xff" + bytes(12),
    b"\xa5hello",
]


def test_a_head_that_is_no_map_is_a_breach(example: Any, examples: dict[str, Any]) -> None:
    for head in NO_MAPS:
        bad = frame_with(codec.encode(example), head)
        assert outcome(receiver_of(example, examples), bad) is None, head[:20]


def test_lengths_off_by_one_are_breaches(example: Any, examples: dict[str, Any]) -> None:
    data = codec.encode(example)
    body, number, flags, head_bytes, session = HEADER.unpack_from(data)
    rest = data[HEADER_BYTES:]
    more = codec.encode(m.Ping(1)) * 3
    for bad_body, bad_head in (
        (body - 1, head_bytes),
        (body + 1, head_bytes),
        (body, head_bytes - 1),
        (body + 1, head_bytes + 1),
        (0, head_bytes),
        (0, 0),
        (body, body + 1),
        (body, 65_535),
    ):
        bad = HEADER.pack(bad_body, number, flags, bad_head, session) + rest + more
        connection = receiver_of(example, examples)
        assert outcome(connection, bad) is None, (bad_body, bad_head)
    if head_bytes + 1 <= body:
        bad = HEADER.pack(body, number, flags, head_bytes + 1, session) + rest
        assert outcome(receiver_of(example, examples), bad) is None
    head, blob = rest[:head_bytes], rest[head_bytes:]
    assert outcome(receiver_of(example, examples), frame_with(data, head, blob=blob + b"x")) is None
    if blob:
        assert (
            outcome(receiver_of(example, examples), frame_with(data, head, blob=blob[:-1])) is None
        )


def test_the_header_alone_condemns_a_frame(example: Any, examples: dict[str, Any]) -> None:
    """Nothing of the body was sent, let alone kept."""
    _, number, _, head_bytes, session = HEADER.unpack_from(codec.encode(example))
    spec = SCHEMA.by_shape[type(example)]
    limit = codec.body_bytes_max(spec, LIMITS)
    wrong_session = 5 if session == 0 and not spec.may_lack_session else 0
    headers = [
        HEADER.pack(limit + 1, number, 0, head_bytes, session),
        HEADER.pack(2**32 - 1, number, 0, head_bytes, session),
        HEADER.pack(100, number, 0, 101, session),
        HEADER.pack(limit, number, 1, head_bytes, session),
        HEADER.pack(limit, number, 128, head_bytes, session),
        HEADER.pack(limit, 0x7F, 0, head_bytes, session),
        HEADER.pack(limit, 0, 0, head_bytes, session),
    ]
    if not spec.may_lack_session:
        headers.append(HEADER.pack(limit, number, 0, 1, wrong_session))
    if limit > LIMITS.head_bytes_max:
        headers.append(HEADER.pack(limit, number, 0, LIMITS.head_bytes_max + 1, session))
    for header in headers:
        assert outcome(receiver_of(example, examples), header) is None, header.hex()


def test_nobody_may_send_what_the_other_side_says(example: Any, examples: dict[str, Any]) -> None:
    spec = SCHEMA.by_shape[type(example)]
    for receiver in Role:
        if receiver.other in spec.senders:
            continue
        stand_in = m.Renew(1) if receiver is Role.NODE else m.Opened(1, 1, 1, 1)
        connection = receiver_of(stand_in, examples)
        assert connection.role is receiver
        assert outcome(connection, codec.encode(example)) is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([0x01, 0x10, 0x13, 0x06, 0x18, 0x20, 0x27, 0x2B]))
def test_noise_behind_a_header_never_raises_anything_else(body: bytes, number: int) -> None:
    head_bytes = len(body) // 2
    spec = SCHEMA.by_number[number]
    data = HEADER.pack(len(body), number, 0, head_bytes, int(spec.has_session)) + body
    connection = Connection(spec.senders[0].other)
    connection.state = connection.state.OPEN if number != 1 else connection.state
    outcome(connection, data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_byte_never_raises_anything_else(data: st.DataObject) -> None:
    row = m.TokenRow(2**63, 1, 5, (1, 2), logprobs=(TokenLogprobs(-1.0, ((3, -2.0),)),) * 2)
    frame = bytearray(codec.encode(m.Tokens((row, m.TokenRow(3, 1, 0, (9,))))))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    connection = Connection(Role.HEAD)
    connection.state = connection.state.OPEN
    connection.receive_data(bytes(frame), 0)
    try:
        connection.next_event()
    except RemoteProtocolError:
        assert connection.state is connection.state.BROKEN


# --- a head that is read at once is judged like one whose maps are looked at one by one --------------


def parted(message: m.Message) -> Frame:
    """The frame of a message, undecoded."""
    frames = FrameBuffer()
    frames.feed(codec.encode(message), 0)
    frame = frames.next(lambda _header: None)
    assert frame is not None
    return frame


def said(head: bytes) -> list[bytes]:
    """The pairs of a head, still packed."""
    return [
        msgpack.packb(key) + msgpack.packb(value) for key, value in msgpack.unpackb(head).items()
    ]


def test_a_longer_way_to_count_the_keys_says_the_same(examples: dict[str, Any]) -> None:
    for message in examples.values():
        frame = parted(message)
        pairs = said(frame.head)
        head = b"\xde" + len(pairs).to_bytes(2, "big") + b"".join(pairs)
        assert codec.decode(Frame(frame.header, head, frame.blob)) == message


def test_a_key_that_comes_twice_is_a_breach_in_every_message(examples: dict[str, Any]) -> None:
    for message in examples.values():
        frame = parted(message)
        pairs = said(frame.head)
        for wrong in ([*pairs, pairs[0]], [pairs[0], *pairs[:-1]]):
            count = len(wrong)
            if count > 15 or wrong == pairs:
                continue
            head = bytes((0x80 | count,)) + b"".join(wrong)
            with pytest.raises(RemoteProtocolError):
                codec.decode(Frame(frame.header, head, frame.blob))


def test_a_key_that_comes_twice_within_a_list_is_a_breach() -> None:
    load = m.EngineLoad(1, 2, 3, 4, 5, 6, 7, 1.0, ())
    status = m.Status(1, 2, 3, 4, (0, 0, 0, 0), 5, 6, 7, 8, 1.0, (), 9, False, (load, load))
    frame = parted(status)
    assert codec.decode(frame) == status
    once, twice = msgpack.packb("lanes") + b"\x02", 2 * (msgpack.packb("lanes") + b"\x02")
    head = frame.head.replace(b"\x89", b"\x8a").replace(b"\xa5" + once[1:], twice)
    head = head.replace(twice, once, 1)  # the status's own
    assert head != frame.head
    with pytest.raises(RemoteProtocolError, match="a key twice"):
        codec.decode(Frame(frame.header, head, frame.blob))


def test_the_first_wrong_field_is_named_whatever_its_kind() -> None:
    closed = m.Closed(1, 2, m.CloseReason.FENCED, None, "")
    frame = parted(closed)
    raw = msgpack.unpackb(frame.head)
    for wrong, named in (
        ({"epoch": -1, "reason": "?"}, "epoch"),
        ({"reason": "?", "text": 1}, "reason"),
        ({"text": 1}, "text"),
    ):
        head = msgpack.packb(raw | wrong)
        with pytest.raises(RemoteProtocolError, match=f"bad Closed: {named} "):
            codec.decode(Frame(frame.header, head, frame.blob))
