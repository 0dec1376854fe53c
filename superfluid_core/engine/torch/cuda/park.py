"""Parked KV on its way between a CUDA pool and the host, beside the steps instead of in front of them.

Owns pinned host copies by ticket, and the order of three things: blocks are gathered on the main stream, where the next steps may then
overwrite them; a side stream moves the gathered piece; events say when a piece is there. Moves go in pieces, at most two of a direction
under way at once, so that a large session never takes more device memory than that.

    out    main: gather piece -> event | side: wait, copy to the host -> event
    in     side: wait for the piece's event, copy to the device -> event | main: wait, scatter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from superfluid_core.limits import MIB

PIECE_BYTES = 32 * MIB
PIECES_UNDER_WAY = 2

Wait = Callable[[], None]


class Streams(Protocol):
    """The main stream and one beside it."""

    def to_host(self, piece: Tensor) -> tuple[Tensor, Wait]:
        """Copy what the main stream makes, beside it; the copy may be read after `Wait`."""
        ...

    def to_device(self, piece: Tensor) -> tuple[Tensor, Wait]:
        """Copy to the device, beside the main stream, which finds the copy done; after `Wait` so does the host.

        `piece` may be let go at once: torch's cache of pinned memory knows when a copy from it is over.
        """
        ...


def _nothing() -> None:
    """Wait for what is done already."""


class HostStreams:
    """A pool in host memory: gathering is the copy, and everything is in order."""

    def to_host(self, piece: Tensor) -> tuple[Tensor, Wait]:
        return piece, _nothing

    def to_device(self, piece: Tensor) -> tuple[Tensor, Wait]:
        return piece, _nothing


class CudaStreams:
    """Pinned memory and a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no hints here

    def to_host(self, piece: Tensor) -> tuple[Tensor, Wait]:
        host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            host.copy_(piece, non_blocking=True)
            piece.record_stream(self._side)
            done = self._side.record_event()
        return host, done.synchronize

    def to_device(self, piece: Tensor) -> tuple[Tensor, Wait]:
        with torch.cuda.stream(self._side):
            moved = piece.to(self._device, non_blocking=True)
            done = self._side.record_event()
        main = torch.cuda.current_stream(self._device)
        main.wait_event(done)
        moved.record_stream(main)
        return moved, done.synchronize


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some blocks on the host, there after `wait`."""

    kept: Tensor
    wait: Wait


class ParkStore:
    """Host copies by ticket. `gather` and `scatter` are the pool's, in device memory, in order of the main stream."""

    def __init__(
        self,
        block_bytes: int,
        gather: Callable[[Sequence[int]], Tensor],
        scatter: Callable[[Sequence[int], Tensor], None],
        streams: Streams,
    ) -> None:
        self._piece_blocks = max(1, PIECE_BYTES // block_bytes)
        self._gather = gather
        self._scatter = scatter
        self._streams = streams
        self._kept: dict[int, list[_Piece]] = {}

    def put(self, ticket: int, blocks: Sequence[int]) -> None:
        """Keep a copy of `blocks`, in order."""
        pieces: list[_Piece] = []
        for first in range(0, len(blocks), self._piece_blocks):
            if len(pieces) >= PIECES_UNDER_WAY:
                pieces[-PIECES_UNDER_WAY].wait()
            gathered = self._gather(blocks[first : first + self._piece_blocks])
            pieces.append(_Piece(*self._streams.to_host(gathered)))
        self._kept[ticket] = pieces

    def take(self, ticket: int, blocks: Sequence[int]) -> None:
        """Put the first len(blocks) blocks kept under `ticket` into `blocks`; the ticket is used up."""
        waits: list[Wait] = []
        first = 0
        for piece in self._kept.pop(ticket):
            wanted = blocks[first : first + piece.kept.shape[2]]
            if not wanted:
                break
            if len(waits) >= PIECES_UNDER_WAY:
                waits[-PIECES_UNDER_WAY]()
            piece.wait()
            moved, wait = self._streams.to_device(piece.kept[:, :, : len(wanted)].contiguous())
            waits.append(wait)
            self._scatter(wanted, moved)
            first += len(wanted)

    def drop(self, ticket: int) -> None:
        """Forget a copy; a ticket that is used up is no error."""
        self._kept.pop(ticket, None)

    def counts(self) -> dict[int, int]:
        """How many blocks are kept under each ticket."""
        return {
            ticket: sum(int(piece.kept.shape[2]) for piece in pieces)
            for ticket, pieces in self._kept.items()
        }


def streams_for(device: torch.device) -> Streams:
    """Choose what moves KV between this device and the host."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
