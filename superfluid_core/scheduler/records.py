"""What the scheduler remembers of one session, from Submit to its terminal event.

A record is plain state: queues, lanes and accounts write the fields that their comments name, and nobody else does.
Its context only grows, so block names computed once stay true.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from superfluid_core.session import QosClass, SessionKey, SessionSpec


class Phase(StrEnum):
    """Where a session is; a live one is in exactly one of the first three (S1)."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """One session. `seq` is its order of arrival; `context` is its prompt and all its outputs.

    At `context_limit` tokens it ends with `length`: by its own maximum, or by window and pool.
    """

    spec: SessionSpec
    seq: int
    qos: QosClass
    context: list[int]
    context_limit: int
    phase: Phase = Phase.QUEUED

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

    # accounts: see accounts.py
    root: bytes = b""
    chain: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    table: tuple[int, ...] | None = None
    published: int = 0
    is_private: bool = False
    reserved: int = 0
    outstanding: int = 0

    # progress: context positions with KV, those of them from the cache, those computed once before
    computed: int = 0
    cached: int = 0
    recompute_below: int = 0

    @property
    def key(self) -> SessionKey:
        return self.spec.key

    @property
    def output(self) -> int:
        return len(self.context) - len(self.spec.prompt)

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
