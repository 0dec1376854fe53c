"""KV of preempted sessions goes to the host and comes back (S14).

A ticket holds a session's blocks from the last one down to the first that nobody else holds: what is missing in the cache when the
session returns is always the front part of its ticket, and that is what an engine can restore. What others hold stays where it
is. Restored blocks become findable only after the plan that fills them has run.
"""

from __future__ import annotations

from typing import NamedTuple

from superfluid_core.scheduler.accounts import Accounts
from superfluid_core.scheduler.records import Parked, Session


class Returned(NamedTuple):
    """Positions that came back from the host: as prefix blocks, and from the session's own ticket."""

    imported: int
    restored: int


def own_positions(accounts: Accounts, session: Session) -> int:
    """Positions with KV behind those that others hold too: what a preemption takes from an active session."""
    first = _first_own(accounts, session)
    return 0 if first is None else session.computed - first * accounts.shape.block_tokens


def _first_own(accounts: Accounts, session: Session) -> int | None:
    """Find the first filled block that nobody else holds."""
    filled = accounts.blocks_for(session.computed)
    references = accounts.pool.references
    places = enumerate(session.blocks[:filled])
    return next((place for place, each in places if references(each) == 1), None)


def put_away(accounts: Accounts, session: Session) -> bool:
    """Copy out what an active session alone holds; False when there is no room. Called before its blocks are closed."""
    if session.imports or not session.computed or session.spec.prompt_logprobs is not None:
        return False
    first = _first_own(accounts, session)
    if first is None:
        return False
    filled = session.blocks[: accounts.blocks_for(session.computed)]
    ticket = accounts.park.keep(filled[first:][::-1])
    if ticket is None:
        return False
    session.parked = Parked(ticket, first, session.computed)
    return True


def bring_back(accounts: Accounts, session: Session) -> Returned:
    """Fetch what the host has of an admitted session, after its cached front was taken, into blocks of its own.

    Where the cache has as much as the ticket, or has lost what the ticket builds on, the ticket is given up.
    """
    parked, session.parked = session.parked, None
    imported = restored = 0
    if parked is not None:
        if len(session.blocks) < parked.first:
            imported = accounts.import_prefix(session)
        restored = _restore(accounts, session, parked)
    if not restored:
        imported += accounts.import_prefix(session)
    return Returned(imported, restored)


def _restore(accounts: Accounts, session: Session, parked: Parked) -> int:
    start, held = session.computed, len(session.blocks)
    if held < parked.first or start >= parked.positions:
        accounts.park.give_up(parked.ticket)
        return 0
    count = accounts.blocks_for(parked.positions) - held
    fresh = [accounts.cache.allocate() for _ in range(count)]
    accounts.park.restore(parked.ticket, fresh[::-1])
    session.blocks += fresh
    session.imports.append(parked.ticket)
    session.computed = parked.positions
    accounts.settle(session)
    return parked.positions - start


def give_up(accounts: Accounts, session: Session) -> None:
    """Forget the KV of a waiting session that ends: nobody will ask for it."""
    if session.parked is not None:
        accounts.park.give_up(session.parked.ticket)
        session.parked = None
