"""The block accounts of sessions: what each holds, what each was promised, what is left for others.

Invariant (S9): `reserved` is the sum of `Session.reserved` over active sessions, and the blocks that were promised but
not yet handed out never exceed the blocks that can be handed out: outstanding <= free + idle. A promise is made at admission,
for the whole context (or for the whole session, under `--kv-reserve full`), and is kept chunk by chunk.

    blocks    [ adopted from the cache | own, published when full | own, being filled | spare for a grant ]
"""

from __future__ import annotations

from superfluid_core.blockhash import block_hash
from superfluid_core.kv.blocks import BlockPool, PoolShape
from superfluid_core.kv.park import ParkStore
from superfluid_core.kv.prefix import PrefixCache
from superfluid_core.scheduler.records import BlockKey, Session


class Accounts:
    """Holds the pool, the prefix cache and the host's store; every block of every session passes through here."""

    def __init__(
        self, shape: PoolShape, watermark_pct: int, *, reserves_output: bool, park_blocks: int = 0
    ) -> None:
        self.shape = shape
        self.pool = BlockPool(shape.blocks)
        self.park = ParkStore(park_blocks)
        self.cache = PrefixCache(self.pool, self.park)
        self.reserved = 0
        self.outstanding = 0
        self.active = 0
        self._watermark = shape.blocks * watermark_pct // 100
        self._reserves_output = reserves_output

    @property
    def available(self) -> int:
        """Blocks that nobody holds and nobody was promised."""
        return self.cache.reachable - self.outstanding

    @property
    def used(self) -> int:
        return self.pool.total - self.cache.reachable

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_tokens)

    # --- the prefix -------------------------------------------------------------------------------

    def _name(self, session: Session, index: int) -> bytes:
        """Return the chain hash of a full block of the context."""
        return self._key(session, index)[0]

    def _key(self, session: Session, index: int) -> BlockKey:
        """Return what a full block is found and verified by: its name, its parent's, its tokens. Computed once."""
        chain = session.chain
        if index < len(chain):
            return chain[index]
        size = self.shape.block_tokens
        parent = chain[-1][0] if chain else session.root
        prompt = session.spec.prompt
        for start in range(len(chain) * size, (index + 1) * size, size):
            end = start + size
            # the prompt is a tuple already
            tokens = prompt[start:end] if end <= session.prompt else None
            tokens = tokens or tuple(session.context[start:end])
            name = block_hash(parent, tokens)
            chain.append((name, parent, tokens))
            parent = name
        return chain[index]

    def _find(self, session: Session, index: int) -> int | None:
        return self.cache.find(*self._key(session, index))

    def reusable_max(self, session: Session) -> int:
        """Full blocks that may come from the cache: never the one with the last token."""
        if session.spec.prompt_logprobs is not None:
            return 0
        return (len(session.context) - 1) // self.shape.block_tokens

    def lookup(self, session: Session) -> list[int]:
        """Find the cached blocks of the context's front, in order. Takes nothing."""
        found: list[int] = []
        for index in range(self.reusable_max(session)):
            block = self._find(session, index)
            if block is None:
                break
            found.append(block)
        return found

    def count_hits(self, session: Session, found: int = 0) -> int:
        """Count the front's full blocks that need not be computed, here or in the host; `found` are known to be there."""
        limit = self.reusable_max(session)
        while found < limit:
            key = self._key(session, found)
            if self.cache.find(*key) is None and not self.park.holds(*key):
                break
            found += 1
        return found

    def import_prefix(self, session: Session) -> int:
        """Bring blocks of the front back from the host, into blocks of the session's own; returns the tokens saved."""
        size = self.shape.block_tokens
        limit = self.reusable_max(session)
        start = index = len(session.blocks)
        while index < limit:
            name, parent, tokens = self._key(session, index)
            if not self.park.holds(name, parent, tokens):
                break
            # taken first: the block that is given may push a cached prefix out, and that one this
            ticket, block = self.park.take_prefix(name), self.cache.allocate()
            self.park.bring_in(ticket, block)
            session.blocks.append(block)
            session.imports.append(ticket)
            index += 1
        if index > start:
            session.computed = index * size
            self.settle(session)
        return (index - start) * size

    def block_name(self, session: Session, index: int) -> bytes | None:
        """Name a full block that may be reused; None past those."""
        return self._name(session, index) if index < self.reusable_max(session) else None

    def next_name(self, session: Session) -> bytes | None:
        """Name the block to be computed next, if it is a full one and nothing of it exists yet."""
        size = self.shape.block_tokens
        index = session.computed // size
        if session.computed % size or session.is_private or index >= self.reusable_max(session):
            return None
        return self._name(session, index)

    def names_between(self, session: Session, start: int, end: int) -> list[bytes]:
        """Name the full blocks that computing positions start..end-1 completes from their first token."""
        size = self.shape.block_tokens
        if session.is_private:
            return []
        return [self._name(session, index) for index in range(-(-start // size), end // size)]

    def adopt(self, session: Session) -> int:
        """Move past blocks that others published meanwhile; returns the tokens saved (S15)."""
        size = self.shape.block_tokens
        saved = 0
        limit = 0 if session.is_private else self.reusable_max(session)
        while session.computed % size == 0 and session.computed // size < limit:
            index = session.computed // size
            block = self._find(session, index)
            if block is None:
                break
            self.cache.take(block)
            if index < len(session.blocks):
                self.cache.drop(session.blocks[index])
                session.blocks[index] = block
            else:
                session.blocks.append(block)
            session.computed += size
            session.published = index + 1
            saved += size
        if saved:
            session.table = None
            self.settle(session)
        return saved

    def publish(self, session: Session) -> None:
        """Make every block findable that is full by now; where another was first, move over to it."""
        full = session.computed // self.shape.block_tokens
        index = session.published
        if index >= full:
            return
        blocks, publish = session.blocks, self.cache.publish
        while index < full and not session.is_private:
            name, parent, tokens = self._key(session, index)
            own = blocks[index]
            block = publish(name, blocks[index - 1] if index else None, parent, tokens, own)
            if block is None:
                session.is_private = True
                return
            if block != own:
                self.cache.take(block)
                self.cache.drop(own)
                blocks[index] = block
                session.table = None
            index += 1
            session.published = index

    def next_due(self, session: Session) -> int:
        """Say at which length of its context a decoding session has filled its next block, or ends."""
        size = self.shape.block_tokens
        return min(session.context_limit, (session.computed // size + 1) * size + 1)

    # --- opening and closing ----------------------------------------------------------------------

    def promise(self, session: Session, *, prompt_only: bool = False) -> int:
        """Blocks that an admission promises in all."""
        tokens = len(session.context)
        if self._reserves_output and not prompt_only:
            most = session.prompt + session.spec.max_output
            tokens = max(tokens, min(most, self.shape.context_max) - 1)
        return min(self.blocks_for(tokens), self.pool.total)

    def fits(
        self, session: Session, yielding: Session | None = None, *, prompt_only: bool = False
    ) -> bool:
        """Gates G3 and G4: what the promise takes from others is there, once `yielding` has closed.

        The watermark keeps room for the growth of those who decode; with nobody active it is void, or a prompt of
        nearly the pool's size would wait for ever.
        """
        promised = self.promise(session, prompt_only=prompt_only)
        others = self.active - (yielding is not None)
        room = self.available - (self._watermark if others else 0)
        references = self.pool.references
        alone: set[int] = set()
        if yielding is not None:
            alone = {block for block in yielding.blocks if references(block) == 1}
            room += len(alone) + yielding.outstanding
        if promised <= room:
            return True
        found = self.lookup(session)
        shared = sum(1 for block in found if references(block) and block not in alone)
        return promised - shared <= room

    def open(self, session: Session) -> None:
        """Take the cached front and promise the rest. The caller has asked `fits`."""
        session.blocks = self.lookup(session)
        for block in session.blocks:
            self.cache.take(block)
        size = self.shape.block_tokens
        session.published = len(session.blocks)
        session.is_private = False
        session.table = None
        session.computed = len(session.blocks) * size
        self.active += 1
        self._reserve(session, self.promise(session))

    def close(self, session: Session, *, is_tainted: bool = False) -> None:
        """Let go of everything; `is_tainted` also withdraws it from the cache, for all who hold it."""
        if is_tainted:
            for block in session.blocks[: session.published]:
                self.cache.withdraw(block)
        if session.imports:
            self.park.call_off(session.imports)
            session.imports = []
        for block in reversed(session.blocks):
            self.cache.drop(block)
        session.blocks = []
        session.table = None
        session.computed = session.published = 0
        self.active -= 1
        self._reserve(session, 0)

    # --- growing ----------------------------------------------------------------------------------

    def ensure(self, session: Session, tokens: int) -> bool:
        """Hold blocks for `tokens` positions; False, and nothing changes, when there are not enough."""
        if tokens <= session.places:
            return True
        missing = -(-tokens // self.shape.block_tokens) - len(session.blocks)
        if missing > self.available + session.outstanding:
            return False
        for _ in range(missing):
            session.blocks.append(self.cache.allocate())
        session.table = None
        needed = min(self.blocks_for(len(session.context)), self.pool.total)
        self._reserve(session, max(session.reserved, needed))
        return True

    def missing(self, session: Session, tokens: int) -> int:
        """Blocks beyond those held and promised that `tokens` positions need."""
        more = self.blocks_for(tokens) - len(session.blocks) - session.outstanding
        return max(0, more)

    def trim(self, session: Session) -> int:
        """Give back blocks past the context (left of a grant that was cut short); returns how many."""
        keep = self.blocks_for(len(session.context))
        spare = session.blocks[keep:]
        if spare:
            del session.blocks[keep:]
            session.table = None
            for block in spare:
                self.cache.drop(block)
            self.settle(session)
        return len(spare)

    def table(self, session: Session) -> tuple[int, ...]:
        """Return the block table as a tuple, rebuilt only when it changed."""
        if session.table is None:
            session.table = tuple(session.blocks)
        return session.table

    def _reserve(self, session: Session, blocks: int) -> None:
        self.reserved += blocks - session.reserved
        session.reserved = blocks
        self.settle(session)

    def settle(self, session: Session) -> None:
        """Bring up to date what follows from the session's blocks and its promise."""
        session.places = len(session.blocks) * self.shape.block_tokens
        outstanding = max(0, session.reserved - len(session.blocks))
        self.outstanding += outstanding - session.outstanding
        session.outstanding = outstanding
