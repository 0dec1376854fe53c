"""Remembers requests that killed nodes, by a keyed hash: bounded in number and time, useless to whoever reads it.

The hash covers what reaches the engine (model, prompt ids, grammar), not who asked: the same prompt would kill again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from superfluid_core.clock import SECOND
from superfluid_core.limits import FleetLimits
from superfluid_head.fleet.events import GenerationRequest


class QuarantineTable:
    """Hashes that are refused until their time is over; the oldest makes room when the table is full."""

    def __init__(self, key: bytes, limits: FleetLimits) -> None:
        self._key = hashlib.sha256(key).digest()
        self._limits = limits
        self._until_ns: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_ns)

    def add(self, request: GenerationRequest, now_ns: int) -> None:
        digest = self._digest(request)
        self._until_ns[digest] = now_ns + self._limits.quarantine_s * SECOND
        self._until_ns.move_to_end(digest)
        while len(self._until_ns) > self._limits.quarantine_entries_max:
            self._until_ns.popitem(last=False)

    def holds(self, request: GenerationRequest, now_ns: int) -> bool:
        while self._until_ns:
            digest, until_ns = next(iter(self._until_ns.items()))
            if until_ns > now_ns:
                break
            del self._until_ns[digest]
        return bool(self._until_ns) and self._digest(request) in self._until_ns

    def _digest(self, request: GenerationRequest) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=16)
        digest.update(request.model.encode() + b"\0")
        digest.update(array("q", request.prompt).tobytes())
        if request.grammar is not None:
            digest.update(request.grammar.text.encode())
        return digest.digest()
