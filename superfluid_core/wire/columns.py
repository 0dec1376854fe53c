"""Columns of the blob: the bulk of a message, packed behind its head.

A column leaves a *mark* in the head (a count, or counts) that says how many bytes of the blob are its own; the marks of a
message must account for every byte. Ids are little-endian u32, log-probabilities little-endian doubles. Columns know
neither frames nor whose fault a BreachError is.

    blob of a row of TOKENS:  ids u32[n] | logprob f64[n] | top ids u32[sum] | top logprobs f64[sum]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Protocol, overload

from superfluid_core.session import FinishReason, Grammar, GrammarKind, TokenLogprobs
from superfluid_core.wire.kinds import (
    U32_MAX,
    U64_MAX,
    BreachError,
    Kind,
    Name,
    Nilable,
    Octets,
    Row,
    UInt,
)
from superfluid_core.wire.messages import TokenRow
from superfluid_core.wire.packed import judge_f64, pack_f64, pack_u32, unpack_f64, unpack_u32

HASH_BYTES = 16
ID_BYTES = 4
_ONE_ID = Struct("<I").unpack_from
LOGPROB_MIN = -9999.0
"""What a log-probability of nothing (-inf) is sent as: JSON has no infinities either."""


class Cursor:
    """Hands out the blob from front to back; never beyond its end."""

    def __init__(self, blob: bytes) -> None:
        self._blob = memoryview(blob)
        self._at = 0

    def take(self, bytes_wanted: int) -> memoryview:
        end = self._at + bytes_wanted
        if end > len(self._blob):
            raise BreachError("reaches beyond the blob")
        piece = self._blob[self._at : end]
        self._at = end
        return piece

    def take_ids(self, count: int) -> tuple[int, ...]:
        """Take so many ids; a single one, as most rows have, without a view of it."""
        at = self._at
        if count == 1 and at + ID_BYTES <= len(self._blob):
            self._at = at + ID_BYTES
            found: tuple[int] = _ONE_ID(self._blob, at)
            return found
        return unpack_u32(self.take(ID_BYTES * count))

    def finish(self) -> None:
        if self._at != len(self._blob):
            raise BreachError("leaves bytes of the blob unread")


class Column(Protocol):
    """Reads its bytes by its mark; writes (mark, bytes). Both raise BreachError."""

    def read(self, mark: Any, blob: Cursor) -> Any: ...

    def write(self, value: Any) -> tuple[Any, bytes]: ...


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids; the mark is their count."""

    def read(self, mark: Any, blob: Cursor) -> tuple[int, ...]:
        return unpack_u32(blob.take(4 * UInt(U32_MAX).read(mark)))

    def write(self, value: Any) -> tuple[int, bytes]:
        return len(value), pack_u32(value)


@dataclass(frozen=True, slots=True)
class Hashes:
    """Block hashes of 16 bytes; the mark is their count."""

    def read(self, mark: Any, blob: Cursor) -> tuple[bytes, ...]:
        data = bytes(blob.take(HASH_BYTES * UInt(U32_MAX).read(mark)))
        return tuple([data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)])

    def write(self, value: Any) -> tuple[int, bytes]:
        if any(len(item) != HASH_BYTES for item in value):
            raise BreachError(f"holds a hash that has not {HASH_BYTES} bytes")
        return len(value), b"".join(value)


@dataclass(frozen=True, slots=True)
class Data:
    """Opaque bytes; the mark is their count."""

    bytes_max: int
    multiple: int = 1

    def read(self, mark: Any, blob: Cursor) -> bytes:
        count = UInt(self.bytes_max).read(mark)
        if count % self.multiple:
            raise BreachError(f"is no multiple of {self.multiple} bytes")
        return bytes(blob.take(count))

    def write(self, value: Any) -> tuple[int, bytes]:
        data = bytes(value)
        if len(data) > self.bytes_max or len(data) % self.multiple:
            raise BreachError(f"is over {self.bytes_max} bytes or no multiple of {self.multiple}")
        return len(data), data


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar or nil; the mark is nil or [kind, bytes of its UTF-8 text]."""

    bytes_max: int

    def _mark(self) -> Nilable:
        return Nilable(Row((Name(GrammarKind), UInt(self.bytes_max))))

    def read(self, mark: Any, blob: Cursor) -> Grammar | None:
        found = self._mark().read(mark)
        if found is None:
            return None
        kind, count = found
        try:
            return Grammar(kind, str(blob.take(count), "utf-8"))
        except UnicodeDecodeError:
            raise BreachError("is not UTF-8") from None

    def write(self, value: Any) -> tuple[Any, bytes]:
        if value is None:
            return None, b""
        try:
            data = value.text.encode()
        except UnicodeEncodeError:
            raise BreachError("is not UTF-8") from None
        return self._mark().write((value.kind, len(data))), data


def pack_logprobs(rows: Sequence[TokenLogprobs], tops_max: int) -> tuple[bytes, bytes]:
    """(how many tops each, a byte apiece; the packed floats and ids)."""
    counts = [len(row.top) for row in rows]
    if counts and max(counts) > tops_max:
        raise BreachError(f"has more than {tops_max} log-probabilities for an id")
    tops = [top for row in rows for top in row.top]
    packed = pack_f64([max(row.logprob, LOGPROB_MIN) for row in rows])
    if tops:
        packed += pack_u32([top[0] for top in tops])
        packed += pack_f64([max(top[1], LOGPROB_MIN) for top in tops])
    return bytes(counts), packed


def unpack_logprobs(counts: bytes, blob: Cursor, tops_max: int) -> tuple[TokenLogprobs, ...]:
    """Reverse pack_logprobs."""
    return tuple(take_logprobs(counts, blob, tops_max))


def take_logprobs(counts: bytes, blob: Cursor, tops_max: int) -> PackedLogprobs:
    """Judge what pack_logprobs packed and leave it packed: a reader that is slow keeps it for long."""
    if counts and max(counts) > tops_max:
        raise BreachError(f"has more than {tops_max} log-probabilities for an id")
    total = sum(counts)
    data = bytes(blob.take(8 * len(counts) + 12 * total))
    ids_at = 8 * len(counts)
    judge_f64(data[:ids_at])
    judge_f64(data[ids_at + 4 * total :])
    return PackedLogprobs(counts, data)


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Log-probabilities as they came: twelve bytes each instead of a hundred, and objects only while somebody looks."""

    __slots__ = ("_counts", "_data")

    def __init__(self, counts: bytes, data: bytes) -> None:
        self._counts = counts
        self._data = data

    def joined(self, other: PackedLogprobs) -> PackedLogprobs:
        """Return these and behind them those of `other`, still packed."""
        both = zip(self._parts(), other._parts(), strict=True)
        return PackedLogprobs(self._counts + other._counts, b"".join([a + b for a, b in both]))

    def _parts(self) -> tuple[bytes, bytes, bytes]:
        """Cut into the ids' own floats, the top ids and the top floats."""
        ids_at = 8 * len(self._counts)
        floats_at = ids_at + 4 * sum(self._counts)
        return self._data[:ids_at], self._data[ids_at:floats_at], self._data[floats_at:]

    def _rows(self) -> tuple[TokenLogprobs, ...]:
        own, ids, floats = self._parts()
        tops = tuple(zip(unpack_u32(ids), unpack_f64(floats), strict=True))
        rows, start = [], 0
        for logprob, count in zip(unpack_f64(own), self._counts, strict=True):
            rows.append(TokenLogprobs(logprob, tops[start : start + count]))
            start += count
        return tuple(rows)

    def __len__(self) -> int:
        return len(self._counts)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[TokenLogprobs, ...]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | tuple[TokenLogprobs, ...]:
        return self._rows()[index]

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return iter(self._rows())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedLogprobs):
            return (self._counts, self._data) == (other._counts, other._data)
        return self._rows() == other

    def __hash__(self) -> int:
        return hash(self._rows())

    def __repr__(self) -> str:
        return repr(self._rows())


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of a run of ids; the mark is one byte of tops for each."""

    count_max: int
    tops_max: int

    def read(self, mark: Any, blob: Cursor) -> tuple[TokenLogprobs, ...]:
        return unpack_logprobs(Octets(self.count_max).read(mark), blob, self.tops_max)

    def write(self, value: Any) -> tuple[bytes, bytes]:
        mark, packed = pack_logprobs(value, self.tops_max)
        return Octets(self.count_max).write(mark), packed


_ROW: tuple[Kind, ...] = (
    UInt(U64_MAX, low=1),
    UInt(U32_MAX),
    UInt(U32_MAX),
    UInt(U32_MAX),
    Nilable(Name(FinishReason, (FinishReason.STOP, FinishReason.LENGTH))),
    Nilable(UInt(U32_MAX)),
    Nilable(Octets(U32_MAX)),
)
_ROW_KIND = Row(_ROW)


def _is_plain(mark: Any) -> bool:
    """Whether a mark is one of nothing but ids, as nearly all are: what _ROW_KIND says of those, in one look."""
    if type(mark) is not list or len(mark) != 7:
        return False
    session, epoch, first, count, finish, stop_id, tops = mark
    return (
        finish is stop_id is tops is None
        and type(session) is type(epoch) is type(first) is type(count) is int
        and 0 < session <= U64_MAX
        and 0 <= epoch <= U32_MAX
        and 0 <= first <= U32_MAX
        and 0 <= count <= U32_MAX
    )


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of TOKENS; the mark is an array of [session, epoch, first, count, finish, stop id, tops or nil]."""

    rows_max: int
    tops_max: int

    def read(self, mark: Any, blob: Cursor) -> tuple[TokenRow, ...]:
        if type(mark) is not list or not 1 <= len(mark) <= self.rows_max:
            raise BreachError(f"is not an array of 1 to {self.rows_max}")
        return tuple(
            [
                TokenRow(item[0], item[1], item[2], blob.take_ids(item[3]))
                if _is_plain(item)
                else self._read_row(item, blob)
                for item in mark
            ]
        )

    def _read_row(self, mark: Any, blob: Cursor) -> TokenRow:
        session, epoch, first, count, finish, stop_id, tops = _ROW_KIND.read(mark)
        ids = unpack_u32(blob.take(4 * count))
        logprobs: Sequence[TokenLogprobs] = ()
        if tops is not None:
            if len(tops) != count:
                raise BreachError("has log-probabilities for other than its ids")
            logprobs = take_logprobs(tops, blob, self.tops_max)
        return TokenRow(session, epoch, first, ids, finish, stop_id, logprobs)

    def write(self, value: Any) -> tuple[list[Any], bytes]:
        if not 1 <= len(value) <= self.rows_max:
            raise BreachError(f"is not an array of 1 to {self.rows_max}")
        marks, parts = [], []
        for row in value:
            mark: list[Any] = [row.session, row.epoch, row.first, len(row.ids)]
            mark += [row.finish, row.stop_id, None]
            parts.append(pack_u32(row.ids))
            if row.logprobs:
                if len(row.logprobs) != len(row.ids):
                    raise BreachError("has log-probabilities for other than its ids")
                mark[6], packed = pack_logprobs(row.logprobs, self.tops_max)
                parts.append(packed)
            marks.append(_ROW_KIND.write(mark))
        return marks, b"".join(parts)
