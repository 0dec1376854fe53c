"""What the scheduler remembers of one session, from Submit to its terminal event.

A record is plain state: queues, lanes and accounts write the fields that their comments name, and nobody else does.
Its context only grows, so block names computed once stay true.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from superfluid_core.session import QosClass, SessionKey, SessionSpec


class Phase(StrEnum):
    """Where a session is; a live one is in exactly one of the first three (S1)."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


# a full block: its name, its parent's, its tokens
BlockKey = tuple[bytes, bytes, tuple[int, ...]]


class Parked(NamedTuple):
    """KV of a preempted session in host memory: of its blocks from number `first` on, up to position `positions`."""

    ticket: int
    first: int
    positions: int


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """One session. `seq` is its order of arrival; `context` is its prompt and all its outputs.

    At `context_limit` tokens it ends with `length`: by its own maximum, or by window and pool. `prompt` is the prompt's length.
    `meter` counts the prompt and output tokens of its tenant.
    """

    spec: SessionSpec
    seq: int
    qos: QosClass
    context: list[int]
    context_limit: int
    prompt: int
    meter: list[int]
    phase: Phase = Phase.QUEUED
    # the context's length at which the next token means more than a token: see commit.py
    due: int = 0

    # queues: waiting since, entry number (older entries are void), place before all others
    queued_ns: int = 0
    ticket: int = 0
    front: int = 0
    hit_tokens: int = 0

    # lanes: its lane, the order of admission, the tick it was admitted for, its last tick alone
    lane: int = -1
    admission: int = 0
    admitted_tick: int = 0
    admitted_ns: int = 0
    solo_tick: int = 0

    # accounts: see accounts.py; `places` is the number of positions that its blocks have
    root: bytes = b""
    chain: list[BlockKey] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    places: int = 0
    table: tuple[int, ...] | None = None
    published: int = 0
    is_private: bool = False
    reserved: int = 0
    outstanding: int = 0

    # parking: its KV in the host while it waits, tickets that come into its blocks with the next plan or the one in flight
    parked: Parked | None = None
    imports: list[int] = field(default_factory=list)

    # progress: context positions with KV, those of them from the cache, those computed once before
    computed: int = 0
    cached: int = 0
    recompute_below: int = 0

    @property
    def key(self) -> SessionKey:
        return self.spec.key

    @property
    def output(self) -> int:
        return len(self.context) - self.prompt

    @property
    def output_left(self) -> int:
        """Output tokens until `length`."""
        return self.context_limit - len(self.context)

    @property
    def remaining(self) -> int:
        """Context tokens that are still to be computed."""
        return len(self.context) - self.computed

    @property
    def is_live(self) -> bool:
        return self.phase is not Phase.FINISHED

    @property
    def is_active(self) -> bool:
        return self.phase is Phase.PREFILLING or self.phase is Phase.DECODING

    def has_waited(self, period_ns: int, now_ns: int) -> bool:
        """Starving: queued, or admitted and still without a token, for a whole period (S4, S13)."""
        return now_ns - self.queued_ns >= period_ns
