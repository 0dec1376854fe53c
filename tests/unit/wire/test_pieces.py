"""What is long is cut into frames that fit, and put together it is the same."""

from __future__ import annotations

from superfluid_core.limits import WireLimits
from superfluid_core.session import QosClass, TokenLogprobs
from superfluid_core.wire import codec, pieces
from superfluid_core.wire import messages as m

LIMITS = WireLimits()


def test_bytes_are_cut_and_nothing_is_one_empty_piece() -> None:
    data = bytes(range(256)) * 400
    cut = pieces.split_bytes(data, LIMITS.file_piece_bytes)
    assert b"".join(cut) == data
    assert [len(piece) for piece in cut] == [49152, 49152, 4096]
    assert pieces.split_bytes(b"", 5) == [b""]


def test_tokens_of_many_sessions_are_cut_by_rows_and_by_bytes() -> None:
    logprobs = TokenLogprobs(-1.0, tuple((token, -2.0) for token in range(20)))
    for rows in (
        [m.TokenRow(2**63 + n, 1, 2**31, (n,)) for n in range(700)],
        [m.TokenRow(2**63 + n, 1, 2**31, (n,) * 16, logprobs=(logprobs,) * 16) for n in range(120)],
        [
            m.TokenRow(2**63 + n, 1, 2**31, (n,) * 900, logprobs=(TokenLogprobs(0.0),) * 900)
            for n in range(80)
        ],
    ):
        frames = pieces.split_tokens(rows, LIMITS)
        assert [row for frame in frames for row in frame.rows] == rows
        for frame in frames:
            codec.encode(frame)
    assert pieces.split_tokens([], LIMITS) == []


def test_a_large_snapshot_is_cut_into_numbered_pieces() -> None:
    hashes = [number.to_bytes(16, "big") for number in range(150_000)]
    cut = pieces.split_prefix(9, hashes[:100_000], hashes[100_000:], LIMITS, snapshot=True)
    assert [piece.piece for piece in cut] == list(range(len(cut)))
    assert {piece.pieces for piece in cut} == {len(cut)}
    assert [item for piece in cut for item in piece.added] == hashes[:100_000]
    assert [item for piece in cut for item in piece.removed] == hashes[100_000:]
    for piece in cut:
        codec.encode(piece)
    assert pieces.split_prefix(1, [], [], LIMITS, snapshot=True) == [
        m.Prefix(1, 0, 1, True, (), ())
    ]


def test_prompt_logprobs_are_cut_with_their_positions() -> None:
    rows = [TokenLogprobs(-float(n), tuple((n, -1.0) for _ in range(20))) for n in range(1000)]
    cut = pieces.split_prompt_logprobs(5, 1, 1, rows, LIMITS)
    assert [row for piece in cut for row in piece.rows] == rows
    at = 1
    for piece in cut:
        assert piece.first == at
        at += len(piece.rows)
        codec.encode(piece)


def test_a_listing_of_sessions_with_the_longest_names_fits() -> None:
    row = m.SessionRow("h" * 64, 2**64 - 1, "s" * 32, QosClass.AGENT, "é" * 256, 2**31, 2**31)
    cut = pieces.split_sessions(3, [row] * 150)
    assert [len(piece.rows) for piece in cut] == [64, 64, 22]
    for piece in cut:
        codec.encode(piece)
    assert pieces.split_sessions(3, []) == [m.Sessions(3, 0, 1, ())]
