"""How much of a context each node has cached, as placement wants to know it.

Nodes report the names of their cached blocks; the head makes the names of a context's blocks itself and looks them up. Names
depend on a dialect: the salt of the fleet, the size of a block, and whether tenants share. Usually all nodes speak one.
Names are made once and grow with the output. Making them takes 4 us a block, so those of a long prompt are made before
the generation begins, a slice at a time, and the loop goes on in between; without reports none are made at all. What is placed on an
engine that has reported blocks counts as cached there at once (`promises.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from superfluid_core.blockhash import block_chain, root_hash
from superfluid_core.logs import log
from superfluid_core.placement.prefix import PrefixIndex
from superfluid_core.wire.messages import ModelOffer, Prefix, Welcome
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.fleet.promises import Promise, Promises

logger = logging.getLogger(__name__)

SLICE_BLOCKS = 128
SHARED_FEATURE = "prefix-shared"


class Dialect(NamedTuple):
    """What a node's names depend on, beside tenant, `cache_salt` and tokens."""

    salt: bytes
    block_tokens: int
    is_shared: bool


@dataclass(slots=True)
class ContextNames:
    """The names of one context's full blocks so far, by dialect."""

    chains: dict[Dialect, list[bytes]] = field(default_factory=dict, repr=False)

    def grow(
        self, dialect: Dialect, request: GenerationRequest, output: Sequence[int], blocks_max: int
    ) -> bool:
        """Name up to `blocks_max` more blocks. False when there are certainly no more."""
        chain = self.chains.setdefault(dialect, [])
        size, prompt = dialect.block_tokens, request.prompt
        start = len(chain) * size
        blocks = min((len(prompt) + len(output)) // size - len(chain), blocks_max)
        if blocks <= 0:
            return False
        end = start + blocks * size
        tokens = (
            *prompt[start:end],
            *output[max(0, start - len(prompt)) : max(0, end - len(prompt))],
        )
        chain += block_chain(chain[-1] if chain else _root(dialect, request), tokens, size)
        return blocks == blocks_max


def _root(dialect: Dialect, request: GenerationRequest) -> bytes:
    return root_hash(
        dialect.salt,
        tenant="" if dialect.is_shared else request.tenant,
        cache_salt=request.cache_salt,
        variant="batch-invariant" if request.batch_invariant else "",
    )


@dataclass(slots=True)
class _Speaker:
    """An engine of a linked node: its dialect, and the names of the model that its reports are about.

    `has_reported` blocks at least once: of an engine that has not, nobody knows whether it caches anything.
    """

    key: str
    dialect: Dialect
    models: tuple[str, ...]
    has_reported: bool = False


class Warmth:
    """All reports of one head's nodes. Keys are the nodes' `NodeAddress.key`."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._index = PrefixIndex()
        self._promises = Promises()
        # by the index's names for engines
        self._speakers: dict[str, _Speaker] = {}
        self._engines: dict[str, tuple[int, ...]] = {}
        self._spoken: dict[str, dict[Dialect, int]] = {}

    @property
    def blocks(self) -> int:
        """Different blocks known, for a gauge."""
        return len(self._index)

    def attach(self, key: str, welcome: Welcome, offers: Mapping[str, ModelOffer]) -> None:
        """Expect the reports of a node that was just linked: each of its engines makes its own."""
        self.detach(key)
        salt, is_shared = welcome.salt or self._salt, SHARED_FEATURE in welcome.features
        engines = {offer.engine: offer for offer in offers.values()}
        for number, offer in engines.items():
            names = tuple(each.name for each in offers.values() if each.engine == number)
            dialect = Dialect(salt, offer.block_tokens, is_shared)
            self._speakers[_engine(key, number)] = _Speaker(key, dialect, names)
            for name in names:
                spoken = self._spoken.setdefault(name, {})
                spoken[dialect] = spoken.get(dialect, 0) + 1
            self._index.attach(_engine(key, number), offer.blocks)
        self._engines[key] = tuple(engines)

    def detach(self, key: str) -> None:
        for number in self._engines.pop(key, ()):
            self._index.detach(_engine(key, number))
            speaker = self._speakers.pop(_engine(key, number))
            for name in speaker.models:
                spoken = self._spoken[name]
                spoken[speaker.dialect] -= 1
                if not spoken[speaker.dialect]:
                    del spoken[speaker.dialect]

    def take(self, key: str, report: Prefix) -> None:
        engine = _engine(key, report.engine)
        speaker = self._speakers.get(engine)
        if speaker is not None and report.added:
            speaker.has_reported = True
        if report.piece + 1 == report.pieces:
            self._promises.reported(engine)
        if not self._index.fold(engine, report):
            log(
                logger,
                "warning",
                "a report of cached blocks does not follow the last one; waiting for a snapshot",
                node=key,
                engine=report.engine,
                sequence=report.sequence,
            )

    async def name(self, request: GenerationRequest, names: ContextNames) -> None:
        """Make the names of a prompt, letting the loop go on between slices."""
        for dialect in self._dialects(request.model):
            while names.grow(dialect, request, (), SLICE_BLOCKS):  # noqa: ASYNC110 - it works, it does not wait
                await asyncio.sleep(0)

    def cached(
        self, request: GenerationRequest, output: Sequence[int], names: ContextNames
    ) -> Mapping[str, int]:
        """Context tokens that nodes have cached, by key. The last token is always computed."""
        found: dict[str, int] = {}
        longest = len(request.prompt) + len(output) - 1
        for dialect in self._dialects(request.model):
            while names.grow(dialect, request, output, SLICE_BLOCKS):
                pass
            depths = self._index.depths(names.chains[dialect])
            for engine, depth in self._promises.depths(names.chains[dialect]).items():
                depths[engine] = max(depth, depths.get(engine, 0))
            for engine, depth in depths.items():
                speaker = self._speakers.get(engine)
                if speaker is None or speaker.dialect != dialect:
                    continue
                if request.model in speaker.models:
                    found[speaker.key] = min(depth * dialect.block_tokens, longest)
        return found

    def promise(self, key: str, number: int, names: ContextNames) -> Promise | None:
        """Expect a context in the cache of a node's engine, where it was just placed. None where nothing can be expected."""
        speaker = self._speakers.get(_engine(key, number))
        if speaker is None or not speaker.has_reported:
            return None
        chain = names.chains.get(speaker.dialect)
        return self._promises.add(_engine(key, number), chain) if chain else None

    def _dialects(self, model: str) -> list[Dialect]:
        """Return those in which something may have been reported."""
        return list(self._spoken.get(model, ())) if len(self._index) else []


def _engine(key: str, number: int) -> str:
    """Name one engine of a node in the index."""
    return f"{key}/{number}"
