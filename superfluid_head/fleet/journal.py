"""What is remembered of one choice: everything that moves with it, and what its moves have cost. State, no rules; see generation.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from superfluid_head.fleet.events import GenerationRequest


@dataclass(slots=True)
class Journal:
    """What moves with a session. `weights` is set by the first placement that delivered a token."""

    request: GenerationRequest
    ids: list[int] = field(default_factory=list)
    epoch: int = 1
    weights: str | None = None
    boots_suspected: set[str] = field(default_factory=set)
    boots_lost: set[str] = field(default_factory=set)
    moves: int = 0
    failures: int = 0
    drains: int = 0
    cached: int = 0
    cached_epoch: int | None = None
    has_started: bool = False
    hopeless: dict[str, int] = field(default_factory=dict)
