"""Who counts what happens to placements: the head's metrics, handed to the fleet as this protocol. Nothing here decides."""

from __future__ import annotations

from typing import Protocol


class FleetObserver(Protocol):
    """Hears of every placement, and of what each wait for a first token was made of. Never waits, never raises."""

    def placed(self, node: str, policy: str, reason: str) -> None: ...

    def first_token(self, queue_s: float, prefill_s: float, network_s: float) -> None: ...


class Unobserved:
    """Nobody counts."""

    def placed(self, node: str, policy: str, reason: str) -> None:
        """Let it pass."""

    def first_token(self, queue_s: float, prefill_s: float, network_s: float) -> None:
        """Let it pass."""
