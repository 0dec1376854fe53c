"""What a node answers when a head asks: who it is, its text files, its figures, its sessions. Pure.

Long answers come in numbered pieces. The names of text files are those that the model's own reader offered; a name that is not
among them gets one empty piece, so that every ask has an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from superfluid_core.engine.base import EngineInfo
from superfluid_core.limits import LinkLimits, WireLimits
from superfluid_core.wire.messages import (
    MINOR,
    FileAsk,
    FilePiece,
    Hello,
    ModelOffer,
    SessionRow,
    Sessions,
    Stats,
    Welcome,
)
from superfluid_core.wire.pieces import split_bytes, split_sessions

FEATURES = ("files", "sessions", "stats")


@dataclass(frozen=True, slots=True)
class NodeCard:
    """Who this node is and what it serves; constant for the life of the process."""

    identity: str
    boot: str
    names: tuple[str, ...]
    info: EngineInfo
    files: Mapping[str, bytes]

    @property
    def sessions_per_link_max(self) -> int:
        """Twice the lanes, and never less than the head's lanes + 2 (decisions 7)."""
        return max(2 * self.info.lanes, self.info.lanes + 2)

    def offers(self) -> tuple[ModelOffer, ...]:
        info = self.info
        return tuple(
            ModelOffer(
                name=name,
                weights=info.weights_fingerprint,
                text=info.text_fingerprint,
                dtype=info.dtype,
                build=info.engine_build,
                vocabulary=info.vocabulary,
                eos_ids=info.eos_ids,
                window=info.window,
                lanes=info.lanes,
                block_tokens=info.block_tokens,
                blocks=info.blocks,
            )
            for name in self.names
        )

    def welcome(self, hello: Hello, limits: LinkLimits, stamp_ns: int) -> Welcome:
        """Answer a HELLO. `stamp_ns` is CLOCK_BOOTTIME: the first stamp that the head can echo."""
        return Welcome(
            minor=min(MINOR, hello.minor),
            features=FEATURES,
            node=self.identity,
            boot=self.boot,
            models=self.offers(),
            stamp_ns=stamp_ns,
            determinism=self.info.determinism,
            sessions_max=self.sessions_per_link_max,
            lease_ttl_max_ms=limits.lease_ttl_max_ms,
            idle_timeout_ms=limits.idle_timeout_ms,
        )


def file_pieces(ask: FileAsk, card: NodeCard, limits: WireLimits) -> Iterable[FilePiece]:
    """Yield a text file piece by piece, or one empty piece when there is none of that name."""
    data = card.files.get(ask.name) if ask.model in card.names else None
    if data is None or len(data) > limits.file_bytes_max:
        yield FilePiece(ask.request, 0, 1, "", b"")
        return
    digest = sha256(data).hexdigest()
    pieces = split_bytes(data, limits.file_piece_bytes)
    for number, piece in enumerate(pieces):
        yield FilePiece(ask.request, number, len(pieces), digest, piece)


def stats_pieces(request: int, figures: Mapping[str, Any], limits: WireLimits) -> Iterable[Stats]:
    """Yield the node's figures as JSON, in pieces."""
    data = json.dumps(figures, separators=(",", ":"), allow_nan=False).encode()
    pieces = split_bytes(data, limits.file_piece_bytes)
    for number, piece in enumerate(pieces):
        yield Stats(request, number, len(pieces), piece)


def session_pieces(request: int, rows: list[SessionRow]) -> Iterable[Sessions]:
    """Yield what runs and what waits, in pieces."""
    return split_sessions(request, rows)
