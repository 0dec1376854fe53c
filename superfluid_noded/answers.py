"""What a node answers when a head asks: who it is, its text files, its figures, its sessions. Pure.

Long answers come in numbered pieces. The names of text files are those that the model's own reader offered; a name that is not
among them gets one empty piece, so that every ask has an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from superfluid_core.engine.base import EngineInfo
from superfluid_core.limits import LinkLimits, WireLimits
from superfluid_core.wire.announced import tenant_lanes_feature
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
from superfluid_core.wire.notes import TRACE
from superfluid_core.wire.pieces import split_bytes, split_sessions

FEATURES = ("files", "pins", "sessions", "stats")
PREFIX_SHARED = "prefix-shared"
"""Offered by a node whose cached prefixes are not kept apart by tenant: block names do not hold it."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model that this node serves, under one or more names."""

    names: tuple[str, ...]
    info: EngineInfo
    files: Mapping[str, bytes]

    def offers(self, engine: int = 0) -> tuple[ModelOffer, ...]:
        """Offer the model under each of its names; `engine` is its number on this node."""
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
                engine=engine,
            )
            for name in self.names
        )


@dataclass(frozen=True, slots=True)
class NodeCard:
    """Who this node is and what it serves, the main model first; constant for the life of the process.

    `salt` is that of its prefix cache where heads cannot know it: under an own authority. `tenant_lanes` caps the lanes of one
    tenant, 0 does not. `traces`: it exports them.
    """

    identity: str
    boot: str
    models: tuple[ModelCard, ...]
    prefix_shared: bool = False
    salt: bytes = field(default=b"", repr=False)
    tenant_lanes: int = 0
    traces: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        shared = (PREFIX_SHARED,) if self.prefix_shared else ()
        capped = (tenant_lanes_feature(self.tenant_lanes),) if self.tenant_lanes else ()
        traced = (TRACE,) if self.traces else ()
        return (*FEATURES, *shared, *capped, *traced)

    @property
    def main(self) -> ModelCard:
        return self.models[0]

    @property
    def sessions_per_link_max(self) -> int:
        """Twice the lanes, and never less than the head's lanes + 2 of each model (decisions 7)."""
        return sum(max(2 * card.info.lanes, card.info.lanes + 2) for card in self.models)

    def model(self, name: str) -> ModelCard | None:
        """Find the model of that name."""
        return next((card for card in self.models if name in card.names), None)

    def offers(self) -> tuple[ModelOffer, ...]:
        every = [card.offers(number) for number, card in enumerate(self.models)]
        return tuple(offer for offers in every for offer in offers)

    def welcome(self, hello: Hello, limits: LinkLimits, stamp_ns: int) -> Welcome:
        """Answer a HELLO. `stamp_ns` is CLOCK_BOOTTIME: the first stamp that the head can echo."""
        return Welcome(
            minor=min(MINOR, hello.minor),
            features=self.features,
            node=self.identity,
            boot=self.boot,
            models=self.offers(),
            stamp_ns=stamp_ns,
            determinism=self.main.info.determinism,
            sessions_max=self.sessions_per_link_max,
            lease_ttl_max_ms=limits.lease_ttl_max_ms,
            idle_timeout_ms=limits.idle_timeout_ms,
            salt=self.salt,
        )


def file_pieces(ask: FileAsk, card: NodeCard, limits: WireLimits) -> Iterable[FilePiece]:
    """Yield a text file piece by piece, or one empty piece when there is none of that name."""
    model = card.model(ask.model)
    data = None if model is None else model.files.get(ask.name)
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
