"""Two real ends joined in memory: the order of things, however the bytes are split."""

from __future__ import annotations

from typing import Any

import pytest

from superfluid_core.clock import SECOND
from superfluid_core.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from superfluid_core.wire import codec
from superfluid_core.wire import messages as m
from superfluid_core.wire.connection import Connection
from superfluid_core.wire.frames import HEADER, FrameBuffer, Header
from superfluid_core.wire.schema import Role, schema
from superfluid_core.wire.states import State

HELLO = m.Hello(0, ("a", "b"), "h")


def joined(examples: dict[str, Any]) -> tuple[Connection, Connection]:
    head, node = Connection(Role.HEAD), Connection(Role.NODE)
    node.receive_data(head.send(HELLO), 0)
    assert node.next_event() == HELLO
    head.receive_data(node.send(examples["Welcome"]), 0)
    assert head.next_event() == examples["Welcome"]
    return head, node


def drained(connection: Connection) -> list[m.Message]:
    events = []
    while (event := connection.next_event()) is not None:
        events.append(event)
    return events


def sent_by(role: Role, examples: dict[str, Any]) -> list[Any]:
    """Every example that `role` may send on an open link."""
    handshake = (m.Hello, m.Welcome, m.LinkError)
    by_shape = schema(codec.DEFAULT_LIMITS).by_shape
    return [
        example
        for name, example in examples.items()
        if role in by_shape[type(example)].senders
        and not isinstance(example, handshake)
        and name != "Refuse-link"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("role", Role)
def test_every_message_arrives_with_the_bytes_split_at_every_offset(
    role: Role, examples: dict[str, Any]
) -> None:
    head, node = joined(examples)
    sender = head if role is Role.HEAD else node
    expected = sent_by(role, examples)
    stream = b"".join(sender.send(message) for message in expected)
    for offset in range(len(stream) + 1):
        head, node = joined(examples)
        receiver = node if role is Role.HEAD else head
        receiver.receive_data(stream[:offset], 1)
        events = drained(receiver)
        receiver.receive_data(stream[offset:], 2)
        assert events + drained(receiver) == expected
    head, node = joined(examples)
    receiver = node if role is Role.HEAD else head
    events = []
    for offset in range(len(stream)):
        receiver.receive_data(stream[offset : offset + 1], offset)
        events += drained(receiver)
    assert events == expected


def test_the_handshake_agrees_on_the_lower_minor_and_the_common_features(
    examples: dict[str, Any],
) -> None:
    head, node = Connection(Role.HEAD), Connection(Role.NODE)
    assert (head.minor, head.features) == (None, frozenset())
    node.receive_data(head.send(m.Hello(1, ("embed", "later"), "h")), 0)
    node.next_event()
    head.receive_data(node.send(examples["Welcome"]), 0)
    head.next_event()
    assert [head.minor, node.minor] == [0, 0]
    assert head.features == node.features == {"embed"}


def test_a_node_takes_nothing_before_hello(example: Any) -> None:
    node = Connection(Role.NODE)
    node.receive_data(codec.encode(example), 0)
    if isinstance(example, m.Hello):
        assert node.next_event() == example
        return
    with pytest.raises(RemoteProtocolError):
        node.next_event()


def test_a_head_takes_nothing_before_welcome_but_a_refusal(example: Any) -> None:
    head = Connection(Role.HEAD)
    head.send(HELLO)
    head.receive_data(codec.encode(example), 0)
    is_link_refusal = isinstance(example, m.Refuse) and example.session == 0
    if isinstance(example, m.Welcome | m.LinkError) or is_link_refusal:
        assert head.next_event() == example
        assert head.state is (State.OPEN if isinstance(example, m.Welcome) else State.CLOSED)
        return
    with pytest.raises(RemoteProtocolError):
        head.next_event()


def test_a_second_hello_or_welcome_is_a_breach(examples: dict[str, Any]) -> None:
    head, node = joined(examples)
    node.receive_data(codec.encode(HELLO), 0)
    with pytest.raises(RemoteProtocolError, match="Hello"):
        node.next_event()
    head.receive_data(codec.encode(examples["Welcome"]), 0)
    with pytest.raises(RemoteProtocolError, match="Welcome"):
        head.next_event()


def test_nothing_but_hello_may_follow_until_welcome(examples: dict[str, Any]) -> None:
    node = Connection(Role.NODE)
    node.receive_data(codec.encode(HELLO) + codec.encode(m.Renew(1)), 0)
    assert node.next_event() == HELLO
    with pytest.raises(RemoteProtocolError):
        node.next_event()


def test_an_oversize_hello_is_refused_by_its_header() -> None:
    node = Connection(Role.NODE)
    node.receive_data(HEADER.pack(4 * 1024 + 1, 1, 0, 50, 0), 0)
    with pytest.raises(RemoteProtocolError, match="at most 4096"):
        node.next_event()


def test_our_own_mistakes_change_nothing(examples: dict[str, Any]) -> None:
    head = Connection(Role.HEAD)
    for message in (m.Ping(1), examples["Welcome"], examples["Open"]):
        with pytest.raises(LocalProtocolError):
            head.send(message)
    assert head.state is State.START
    head, node = joined(examples)
    for connection, message in ((head, m.Opened(1, 1, 1, 1)), (node, m.Renew(1)), (head, HELLO)):
        with pytest.raises(LocalProtocolError):
            connection.send(message)
        with pytest.raises(LocalProtocolError):
            connection.send(m.Goaway(3))  # type: ignore[arg-type] # a mistake
        assert connection.state is State.OPEN


def test_after_a_breach_only_an_error_may_be_sent(examples: dict[str, Any]) -> None:
    _, node = joined(examples)
    node.receive_data(b"\xff" * 16, 0)
    with pytest.raises(RemoteProtocolError):
        node.next_event()
    assert node.next_event() is None
    with pytest.raises(LocalProtocolError):
        node.send(m.Ping(1))
    assert node.send(m.LinkError(ErrorCode.PROTOCOL_ERROR, "bad"))
    with pytest.raises(LocalProtocolError):
        node.send(m.LinkError(ErrorCode.PROTOCOL_ERROR, "bad"))


def test_an_error_ends_the_link_at_both_ends(examples: dict[str, Any]) -> None:
    head, node = joined(examples)
    error = m.LinkError(ErrorCode.INTERNAL, "x")
    node.receive_data(head.send(error) + codec.encode(m.Renew(1)), 0)
    assert drained(node) == [error]
    assert head.state is node.state is State.CLOSED


def test_a_refused_session_leaves_the_link_open_and_a_refused_link_in_use_is_a_breach(
    examples: dict[str, Any],
) -> None:
    head, node = joined(examples)
    head.receive_data(node.send(examples["Refuse"]), 0)
    assert drained(head) == [examples["Refuse"]]
    with pytest.raises(LocalProtocolError):
        node.send(examples["Refuse-link"])
    head.receive_data(codec.encode(examples["Refuse-link"]), 0)
    with pytest.raises(RemoteProtocolError):
        head.next_event()


def test_optional_types_are_skipped_and_others_unknown_are_not(examples: dict[str, Any]) -> None:
    head, node = joined(examples)
    optional = HEADER.pack(5, 0x80, 0, 2, 77) + b"\xc1\xc1abc" + HEADER.pack(0, 0xFF, 0, 0, 0)
    head.receive_data(optional + node.send(m.Ping(1)) + optional, 0)
    assert drained(head) == [m.Ping(1)]
    assert not head.is_mid_frame
    head.receive_data(HEADER.pack(64 * 1024 + 1, 0x80, 0, 2, 77), 0)
    with pytest.raises(RemoteProtocolError):
        head.next_event()
    node.receive_data(HEADER.pack(0, 0x7F, 0, 0, 0), 0)
    with pytest.raises(RemoteProtocolError, match="unknown frame type"):
        node.next_event()


def test_a_frame_has_its_time_from_its_first_byte(examples: dict[str, Any]) -> None:
    head, node = joined(examples)
    assert node.frame_deadline_ns() is None
    data = head.send(examples["Open"])
    node.receive_data(data[:5], 100)
    assert node.next_event() is None
    assert node.frame_deadline_ns() == 100 + 20 * SECOND
    node.receive_data(data[5:20], 200)
    assert node.next_event() is None
    assert node.frame_deadline_ns() == 100 + 60 * SECOND  # now it is known to be an OPEN
    node.receive_data(data[20:] + data[:3], 300)
    assert node.next_event() == examples["Open"]
    assert node.frame_deadline_ns() == 300 + 20 * SECOND  # the next one has begun
    node.forgive(5000)
    assert node.frame_deadline_ns() == 5000 + 20 * SECOND
    node.receive_data(data[3:], 6000)
    assert drained(node) == [examples["Open"]]
    assert node.frame_deadline_ns() is None


def test_an_end_within_a_frame_is_a_breach_and_between_frames_is_not(
    examples: dict[str, Any],
) -> None:
    head, node = joined(examples)
    data = head.send(m.Ping(1))
    node.receive_data(data, 0)
    assert drained(node) == [m.Ping(1)]
    node.receive_eof()
    assert node.state is State.CLOSED
    _, node = joined(examples)
    node.receive_data(data[:-1], 0)
    assert node.next_event() is None
    with pytest.raises(RemoteProtocolError):
        node.receive_eof()


def test_goaway_is_remembered(examples: dict[str, Any]) -> None:
    head, node = joined(examples)
    head.receive_data(node.send(m.Goaway("drain")), 0)
    assert drained(head) == [m.Goaway("drain")]
    assert head.is_going_away
    assert head.state is State.OPEN


def test_strangers_are_named() -> None:
    for start, words in (
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03abcdef", "TLS"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH"),
    ):
        node = Connection(Role.NODE)
        node.receive_data(start, 0)
        with pytest.raises(RemoteProtocolError, match=words):
            node.next_event()
    head = Connection(Role.HEAD)
    head.send(HELLO)
    head.receive_data(b"\x15\x03\x01\x00\x02\x02\x46" + bytes(16), 0)
    with pytest.raises(RemoteProtocolError, match="TLS alert"):
        head.next_event()


def test_the_buffer_does_not_copy_again_and_again() -> None:
    """An OPEN of the largest size in small pieces, and many small frames in one piece."""
    buffer = FrameBuffer()
    body = bytes(8 * 1024 * 1024)
    header = HEADER.pack(len(body), 0x10, 0, 0, 1)
    buffer.feed(header, 0)
    judged: list[Header] = []
    for start in range(0, len(body), 4096):
        assert buffer.next(judged.append) is None
        buffer.feed(body[start : start + 4096], 0)
    frame = buffer.next(judged.append)
    assert frame is not None
    assert len(frame.blob) == len(body)
    assert len(judged) == 1
    assert len(buffer) == 0
    small = HEADER.pack(4, 0x10, 0, 0, 1) + b"abcd"
    buffer.feed(small * 20_000, 0)
    count = 0
    while buffer.next(judged.append) is not None:
        count += 1
    assert count == 20_000
