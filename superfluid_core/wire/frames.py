"""Frames: where one ends and the next begins. Nothing here knows what a message means.

    >I B B H Q   body bytes u32 | type u8 | flags u8 (0) | head bytes u16 | session u64     16 bytes
    body = head (a msgpack map, at most 60 KiB) + blob (packed ids, floats, hashes, text)

A header is judged (`judge`, passed in) as soon as its 16 bytes are here, before any of its body is kept. The buffer is one
bytearray with a read offset: bytes are copied in once and out once (those of a small body twice), however they were split on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

HEADER = Struct(">IBBHQ")
HEADER_BYTES = HEADER.size
OPTIONAL_TYPES = 0x80
_COMPACT_BYTES = 64 * 1024
_SMALL_BYTES = 2_048


class Header(NamedTuple):
    """The 16 bytes before every body."""

    body_bytes: int
    type: int
    flags: int
    head_bytes: int
    session: int


class Frame(NamedTuple):
    """A whole frame: header, head and blob, undecoded."""

    header: Header
    head: bytes
    blob: bytes


def pack_frame(type_number: int, session: int, head: bytes, blob: bytes) -> bytes:
    header = HEADER.pack(len(head) + len(blob), type_number, 0, len(head), session)
    return b"".join((header, head, blob))


def name_stranger(header: Header) -> str | None:
    """Say what else the first bytes of a connection look like; None when like nothing known."""
    start = header.body_bytes.to_bytes(4, "big")
    if start[:2] == b"\x16\x03":
        return "it speaks TLS: it has a fleet key, and this end has none"
    if start[:2] == b"\x15\x03":
        return "it answers with a TLS alert: it wants a fleet key"
    if start in (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"HTTP", b"PRI "):
        return "it speaks HTTP"
    return "it speaks SSH" if start == b"SSH-" else None


class FrameBuffer:
    """Bytes in, whole frames out. `judge` raises when a header is not acceptable."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0
        self._header: Header | None = None
        self._started_ns: int | None = None
        self._fed_ns = 0

    @property
    def started_ns(self) -> int | None:
        """When the first byte of the unfinished frame came; None between frames."""
        return self._started_ns

    @property
    def header(self) -> Header | None:
        """The judged header of the unfinished frame, once its 16 bytes are here."""
        return self._header

    @property
    def is_empty(self) -> bool:
        return not self._data

    def __len__(self) -> int:
        return len(self._data) - self._at

    def feed(self, data: bytes, now_ns: int) -> None:
        if data:
            self._data += data
            self._fed_ns = now_ns
            if self._started_ns is None:
                self._started_ns = now_ns

    def forgive(self, now_ns: int) -> None:
        """Count the unfinished frame's time from now: it was we who did not read."""
        if self._started_ns is not None:
            self._started_ns = now_ns

    def next(self, judge: Callable[[Header], None]) -> Frame | None:
        """Return the next whole frame, or None until more bytes are fed."""
        data, head_at, header = self._data, self._at + HEADER_BYTES, self._header
        if header is None:
            if len(data) < head_at:
                return None
            header = Header._make(HEADER.unpack_from(data, self._at))
            judge(header)
            self._header = header
        end = head_at + header.body_bytes
        if len(data) < end:
            return None
        blob_at = head_at + header.head_bytes
        if header.body_bytes <= _SMALL_BYTES:  # copied twice sooner than looked at without
            blob = bytes(data[blob_at:end]) if blob_at < end else b""
            frame = Frame(header, bytes(data[head_at:blob_at]), blob)
        else:
            with memoryview(data) as view:
                frame = Frame(header, bytes(view[head_at:blob_at]), bytes(view[blob_at:end]))
        self._advance(end)
        return frame

    def _advance(self, end: int) -> None:
        self._header = None
        self._at = end
        if end == len(self._data):
            self._data.clear()
            self._at = 0
            self._started_ns = None
            return
        self._started_ns = self._fed_ns  # the next frame's first byte came no later than this
        if end >= _COMPACT_BYTES:
            del self._data[:end]
            self._at = 0

    def drop(self) -> None:
        """Forget everything: the link is broken."""
        self._data = bytearray()
        self._at = 0
        self._header = None
        self._started_ns = None
