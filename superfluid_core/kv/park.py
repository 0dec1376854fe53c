"""What of the KV lies in host memory, as plain numbers: tickets, the blocks that each holds, and the moves to be made.

It must not know tensors, sessions or plans. A *ticket* names one host copy: the KV of a preempted session, kept until it is
restored or given up, or one evicted prefix block, kept while there is room, least recently used first to go. Sessions push
prefixes out, never each other: where that is not enough the answer is no, and their KV is computed again.

Moves are collected here and drained into the next plan, which makes drops first, then outs, then ins. A ticket that comes in is used up, but
its bytes count until that plan has run, so that an engine never holds more than `blocks_max`. A refused plan gives its moves back.

    ticket   out pending -> held -> in pending -> in flight -> used up
                            held -> drop pending -> gone
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Moves(NamedTuple):
    """What the next plan is to do, in this order: tickets to drop, (ticket, blocks) to copy out, and to bring in."""

    drops: tuple[int, ...] = ()
    outs: tuple[tuple[int, tuple[int, ...]], ...] = ()
    ins: tuple[tuple[int, tuple[int, ...]], ...] = ()


NO_MOVES = Moves()


@dataclass(slots=True, eq=False, repr=False)
class _Prefix:
    parent: bytes
    tokens: tuple[int, ...]
    ticket: int


class ParkStore:
    """Accounts of host memory for `blocks_max` blocks; 0 keeps nothing. `is_open` says whether anything may move in."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self.is_open = blocks_max > 0
        self.blocks = 0
        self.refused = 0
        self.dropped = 0
        self._tickets = 0
        self._sessions: dict[int, int] = {}
        # least recently used first
        self._prefixes: dict[bytes, _Prefix] = {}
        self._leaving: dict[int, int] = {}
        self._drops: dict[int, None] = {}
        self._outs: dict[int, tuple[int, ...]] = {}
        self._ins: dict[int, tuple[int, ...]] = {}
        self._flight = NO_MOVES

    @property
    def sessions(self) -> int:
        """Tickets of preempted sessions."""
        return len(self._sessions)

    @property
    def prefixes(self) -> int:
        """Prefix blocks that could be brought back."""
        return len(self._prefixes)

    @property
    def has_moves(self) -> bool:
        """Whether the next plan is to carry moves."""
        return bool(self._drops or self._outs or self._ins)

    @property
    def has_drops(self) -> bool:
        return bool(self._drops)

    # --- sessions ---------------------------------------------------------------------------------

    def keep(self, blocks: Sequence[int]) -> int | None:
        """Copy these blocks out under a ticket of their own; None when there is no room or nothing may move in."""
        if not self.is_open or not blocks:
            return None
        if not self._make_room(len(blocks)):
            self.refused += 1
            return None
        ticket = self._move_out(tuple(blocks))
        self._sessions[ticket] = len(blocks)
        return ticket

    def restore(self, ticket: int, blocks: Sequence[int]) -> None:
        """Bring the first blocks of a session's ticket into `blocks`; the rest of it is forgotten."""
        self._leaving[ticket] = self._sessions.pop(ticket)
        self._ins[ticket] = tuple(blocks)

    def give_up(self, ticket: int) -> None:
        """Nobody will restore this ticket."""
        self._discard(ticket, self._sessions.pop(ticket))

    # --- prefixes ---------------------------------------------------------------------------------

    def keep_prefix(self, name: bytes, parent: bytes, tokens: tuple[int, ...], block: int) -> None:
        """Copy an evicted block out, if there is room that no session has taken."""
        if not self.is_open:
            return
        known = self._prefixes.get(name)
        if known is not None:
            # the same tokens were computed again meanwhile: used is used
            if known.tokens == tokens and known.parent == parent:
                self._prefixes[name] = self._prefixes.pop(name)
            return
        if not self._make_room(1):
            return
        self._prefixes[name] = _Prefix(parent, tokens, self._move_out((block,)))

    def holds(self, name: bytes, parent: bytes, tokens: tuple[int, ...]) -> bool:
        """Tell whether the block of `tokens` after `parent` is here; a hash that lies is a miss."""
        known = self._prefixes.get(name)
        return known is not None and known.tokens == tokens and known.parent == parent

    def take_prefix(self, name: bytes) -> int:
        """Nobody else may find this prefix, and nothing pushes it out: its ticket is to be brought in."""
        ticket = self._prefixes.pop(name).ticket
        self._leaving[ticket] = 1
        return ticket

    def bring_in(self, ticket: int, block: int) -> None:
        """Bring a prefix that was taken into `block`."""
        self._ins[ticket] = (block,)

    def drop_prefixes(self) -> int:
        """Give up all prefixes; returns how many there were."""
        count = len(self._prefixes)
        while self._prefixes:
            self._drop_oldest()
        return count

    # --- moves ------------------------------------------------------------------------------------

    def drain(self) -> Moves:
        """Return the moves that the plan now being made is to carry. Answered by `landed` or `refuse`."""
        assert self._flight is NO_MOVES, "a plan with moves is in flight"
        if not (self._drops or self._outs or self._ins):
            return NO_MOVES
        self._flight = Moves(
            tuple(self._drops), tuple(self._outs.items()), tuple(self._ins.items())
        )
        self._drops, self._outs, self._ins = {}, {}, {}
        return self._flight

    def landed(self) -> None:
        """Note that the plan in flight has made its moves."""
        for ticket, _ in self._flight.ins:
            self.blocks -= self._leaving.pop(ticket)
        self._flight = NO_MOVES

    def refuse(self, wanted: Collection[int]) -> None:
        """Note that the plan in flight made no move: they are to be made again; ins only of tickets still `wanted`."""
        flight, self._flight = self._flight, NO_MOVES
        held = {*self._sessions, *(each.ticket for each in self._prefixes.values())}
        ins = {ticket: blocks for ticket, blocks in flight.ins if ticket in wanted}
        again = {
            ticket: blocks for ticket, blocks in flight.outs if ticket in held or ticket in ins
        }
        self._outs = {**again, **self._outs}
        self._ins = {**ins, **self._ins}
        for ticket, _ in flight.outs:
            self._drops.pop(ticket, None)
        self._drops = {**dict.fromkeys(flight.drops), **self._drops}
        never_out = {ticket for ticket, _ in flight.outs}
        for ticket, _ in flight.ins:
            if ticket not in ins:
                self.blocks -= self._leaving.pop(ticket)
                if ticket not in never_out:
                    self._drops[ticket] = None

    def call_off(self, tickets: Collection[int]) -> None:
        """Ins that no plan carries yet are not wanted any more; those in flight come in all the same."""
        for ticket in tickets:
            if self._ins.pop(ticket, None) is not None:
                self._discard(ticket, self._leaving.pop(ticket))

    # --- within -----------------------------------------------------------------------------------

    def _make_room(self, blocks: int) -> bool:
        """Drop prefixes until `blocks` more fit; nothing is dropped where that cannot be enough."""
        if self.blocks - len(self._prefixes) + blocks > self.blocks_max:
            return False
        while self.blocks + blocks > self.blocks_max:
            self._drop_oldest()
        return True

    def _drop_oldest(self) -> None:
        self.dropped += 1
        self._discard(self._prefixes.pop(next(iter(self._prefixes))).ticket, 1)

    def _move_out(self, blocks: tuple[int, ...]) -> int:
        self._tickets += 1
        self.blocks += len(blocks)
        self._outs[self._tickets] = blocks
        return self._tickets

    def _discard(self, ticket: int, blocks: int) -> None:
        """Free the bytes of a ticket: no plan carried it out yet, or the next one drops it."""
        self.blocks -= blocks
        if self._outs.pop(ticket, None) is None:
            self._drops[ticket] = None
