"""One end of a link without I/O: bytes in, messages out, and the other way round.

Owns the order of messages (states.py), the direction of each, sizes before WELCOME, the version and the features both ends
have. Knows no socket, no clock and no session: `now_ns` comes in, `frame_deadline_ns()` says when an unfinished frame is
overdue. The peer's breach raises RemoteProtocolError, and the connection is BROKEN: it reads nothing more and can send
nothing but an ERROR. Our own raises LocalProtocolError and changes nothing.
"""

from __future__ import annotations

from superfluid_core.clock import SECOND
from superfluid_core.errors import LocalProtocolError, RemoteProtocolError
from superfluid_core.limits import WireLimits
from superfluid_core.wire import codec
from superfluid_core.wire.frames import FrameBuffer, Header, name_stranger
from superfluid_core.wire.messages import Goaway, Hello, Message, Open, Welcome
from superfluid_core.wire.schema import Role, schema
from superfluid_core.wire.states import EXPECTED, State, next_state

MINOR_OLDEST = 0
"""The oldest minor that this build still speaks: always the one before its own, or 0."""


class Connection:
    """The protocol machine of `role`. Call `next_event` until it returns None after every `receive_data`."""

    def __init__(self, role: Role, limits: WireLimits = codec.DEFAULT_LIMITS) -> None:
        self.role = role
        self.state = State.START
        self.is_going_away = False
        self._peer = role.other
        self._limits = limits
        self._schema = schema(limits)
        self._expected = EXPECTED[role]
        self._frames = FrameBuffer()
        self._hello: Hello | None = None
        self._welcome: Welcome | None = None

    # --- what the handshake agreed on -------------------------------------------------------------

    @property
    def features(self) -> frozenset[str]:
        """Features that both ends have; empty before WELCOME."""
        if self._hello is None or self._welcome is None:
            return frozenset()
        return frozenset(self._hello.features) & frozenset(self._welcome.features)

    @property
    def minor(self) -> int | None:
        """The lower of both minors; None before WELCOME."""
        if self._hello is None or self._welcome is None:
            return None
        return min(self._hello.minor, self._welcome.minor)

    # --- out --------------------------------------------------------------------------------------

    def send(self, message: Message) -> bytes:
        """Make the bytes to write. Raises LocalProtocolError, and then nothing has changed."""
        spec = self._schema.by_shape[type(message)]
        after = next_state(self.state, message)
        if self.role not in spec.senders or after is None:
            raise LocalProtocolError(f"a {self.role} sends no {spec.name} in {self.state.name}")
        data = codec.encode_as(spec, message, self._limits)
        if after is not self.state:
            self._enter(after, message)
        return data

    # --- in ---------------------------------------------------------------------------------------

    def receive_data(self, data: bytes, now_ns: int) -> None:
        if self.state is State.OPEN or self.state not in (State.BROKEN, State.CLOSED):
            self._frames.feed(data, now_ns)

    def receive_eof(self) -> None:
        """Note that the peer will send nothing more. Raises RemoteProtocolError inside a frame."""
        if self.state not in (State.BROKEN, State.CLOSED) and len(self._frames):
            self._break()
            raise RemoteProtocolError("the connection ended in the middle of a frame")
        if self.state is not State.BROKEN:
            self.state = State.CLOSED

    def next_event(self) -> Message | None:
        """Return the next message, or None until more bytes are received. Raises RemoteProtocolError."""
        while self.state is State.OPEN or self.state not in (State.BROKEN, State.CLOSED):
            if self._frames.is_empty:
                return None
            try:
                frame = self._frames.next(self._judge)
                if frame is None:
                    return None
                spec = self._schema.by_number.get(frame.header.type)
                if spec is None:
                    continue  # an optional type of a later minor
                message = codec.decode_as(spec, frame)
                after = next_state(self.state, message)
                if after is None:
                    raise self._out_of_order(type(message).__name__)
                if after is not self.state:
                    self._enter(after, message)
            except RemoteProtocolError:
                self._break()
                raise
            if isinstance(message, Goaway):
                self.is_going_away = True
            return message
        return None

    @property
    def is_mid_frame(self) -> bool:
        return self._frames.started_ns is not None

    def frame_deadline_ns(self) -> int | None:
        """When the frame that has begun must be whole; None between frames."""
        started_ns = self._frames.started_ns
        if started_ns is None:
            return None
        header = self._frames.header
        opens = self._schema.by_shape[Open].number
        is_open = header is not None and header.type == opens
        seconds = self._limits.open_seconds if is_open else self._limits.frame_seconds
        return started_ns + seconds * SECOND

    def forgive(self, now_ns: int) -> None:
        """Count the unfinished frame from now: the time before was ours (we paused reading, or slept)."""
        self._frames.forgive(now_ns)

    # --- inside -----------------------------------------------------------------------------------

    def _judge(self, header: Header) -> None:
        """Judge the header alone: who may send it, when, how large."""
        expected = self._expected.get(self.state)
        spec = self._schema.by_number.get(header.type)
        stranger = None if expected is None else name_stranger(header)
        if stranger is not None:
            raise RemoteProtocolError(stranger)
        if expected is not None and (spec is None or spec.shape not in expected):
            raise self._out_of_order(f"frame type {header.type:#04x}")
        if spec is not None and self._peer not in spec.senders:
            raise RemoteProtocolError(f"a {self._peer} sends no {spec.name}")
        codec.judge_size_as(spec, header, self._limits)

    def _out_of_order(self, what: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"{what} is not acceptable in {self.state.name}")

    def _enter(self, after: State, message: Message) -> None:
        if isinstance(message, Hello):
            self._check_minor(message.minor)
            self._hello = message
        elif isinstance(message, Welcome):
            self._check_minor(message.minor)
            self._welcome = message
        self.state = after

    def _check_minor(self, minor: int) -> None:
        if minor < MINOR_OLDEST:
            raise RemoteProtocolError(f"minor {minor} is older than {MINOR_OLDEST}")

    def _break(self) -> None:
        self.state = State.BROKEN
        self._frames.drop()
