"""One choice of one request, from its first placement to its one end, whatever fails on the way. Pure.

The journal (prompt and emitted ids) is all there is to move. Safety is the acceptance rule, never a clock: ids count if
and only if the generation is placed, the epoch is the current one, they came on the link that the epoch was opened on,
and the first index equals the journal's length. A move raises the epoch first, so what the old node still says is stale.

    WAITING --Placed--> PLACED --loss, fault, refusal--> WAITING ...          at most `moves_max` failures
                                 --second cut----------> JUDGING: did two processes die of this request?
    any ----------------> ENDED: exactly one End or Fail, and nothing after it

Bounds: `moves_max` failed placements, then MOVES_EXHAUSTED; two cuts that each proved to be the death of a node's process end
in REQUEST_QUARANTINED (the poison rule); a node that drains hands over without counting as a failure, DRAINS_MAX times.

When the head replaces a link, a session goes on over the fresh one by the same rule: the epoch is raised first, and the new
epoch is opened on the new link. That is no move: node, slot and lane stay, the node lets the new epoch take the old one's place.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from superfluid_core.clock import MS
from superfluid_core.errors import ErrorCode
from superfluid_core.limits import FleetLimits
from superfluid_core.session import FinishReason
from superfluid_core.wire.messages import CloseReason, TokenRow
from superfluid_head.fleet.codes import BUSY_CODES, FINAL_CODES, LANE_CODES
from superfluid_head.fleet.events import GenerationRequest
from superfluid_head.fleet.journal import Journal
from superfluid_head.fleet.transitions import (
    Acknowledged,
    Action,
    Advanced,
    Announce,
    Arrived,
    Blame,
    BootVerdict,
    ClientGone,
    ClosedByNode,
    Deliver,
    End,
    Fail,
    HeadInput,
    Input,
    Leave,
    Loss,
    NodeInput,
    NodeLost,
    NotPlaced,
    Place,
    Placed,
    Postpone,
    Quarantine,
    RefusedByNode,
    Relieved,
    Relinked,
    Report,
    SendOpen,
    Stalled,
    StopAt,
    Tick,
    TooNarrow,
)

DRAINS_MAX = 16
JUDGE_MS_MAX = 3_000
STALE_OPENS_MAX = 8


class Phase(Enum):
    """Where a generation stands."""

    WAITING = "waiting"
    PLACED = "placed"
    JUDGING = "judging"
    ENDED = "ended"


class GenerationMachine:
    """The failover state machine. `begin` once, then `on_event` for everything that happens."""

    def __init__(self, request: GenerationRequest, limits: FleetLimits) -> None:
        self.journal = Journal(request)
        self.phase = Phase.WAITING
        self.placement: Placed | None = None
        self.stale_rows = 0
        self._is_taken = False
        self._stale_opens = 0
        self._limits = limits
        self._pending_place: Place | None = None
        self._judge_until_ns = 0

    def begin(self) -> list[Action]:
        if self.journal.request.max_output <= 0:
            return self._end(FinishReason.LENGTH)
        return [Place(frozenset(), False, "new")]

    def on_event(self, event: Input, now_ns: int) -> list[Action]:
        """Judge one input; what comes back is to be done in order. Empty after the end."""
        if self.phase is Phase.ENDED:
            self.stale_rows += isinstance(event, Arrived)
            return []
        if isinstance(event, NodeInput):
            return self._on_node(event, now_ns)
        return self._on_head(event, now_ns)

    # --- what the placement's node says ---

    def take_plain(self, link: int, row: TokenRow) -> bool:
        """Append a row that nothing is to be said about but that it came, as nearly all are.

        False when there is more to it: nothing has changed then, and `on_event` is to be told.
        """
        placed, journal, ids = self.placement, self.journal, row.ids
        first = len(journal.ids)
        if (
            placed is None
            or self.phase is not Phase.PLACED
            or row.epoch != journal.epoch
            or link != placed.link
            or row.first != first
            or row.finish is not None
            or not ids
            or first + len(ids) >= placed.max_output
            or (row.logprobs and len(row.logprobs) != len(ids))
        ):
            return False
        for token in ids:
            if token >= placed.vocabulary or token in placed.stop_ids:
                return False
        self._is_taken = True
        journal.ids.extend(ids)
        journal.has_started = True
        journal.weights = placed.weights
        return True

    def _on_node(self, event: NodeInput, now_ns: int) -> list[Action]:
        placed = self.placement
        if (
            self.phase is not Phase.PLACED
            or placed is None
            or event.epoch != self.journal.epoch
            or event.link != placed.link
        ):
            self.stale_rows += isinstance(event, Arrived)
            return []
        self._is_taken |= not isinstance(event, RefusedByNode)
        match event:
            case Arrived():
                return self._on_row(event, placed, now_ns)
            case Acknowledged():
                self._note_cached(event.cached)
                return []
            case Advanced():
                self._note_cached(event.cached)
                self.journal.has_started |= event.done > 0
                return [Report(event.done, event.total, event.cached)]
            case ClosedByNode():
                return self._on_closed(event, placed, now_ns)
            case RefusedByNode():
                return self._on_refused(event, placed, now_ns)
            case Stalled():
                return self._fail_over("session stalled", now_ns, is_told=True, is_blamed=True)

    def _on_row(self, row: Arrived, placed: Placed, now_ns: int) -> list[Action]:
        ids = self.journal.ids
        fault = self._fault(row, placed)
        if fault is not None:
            return self._fail_over(fault, now_ns, is_told=True, is_blamed=True)
        actions: list[Action] = []
        if row.ids:
            ids.extend(row.ids)
            self.journal.has_started = True
            self.journal.weights = placed.weights
            actions.append(Deliver(row.first, row.ids, row.logprobs))
        stop_id = self._stop_id(placed)
        if row.finish is not None:
            return actions + self._end(row.finish, row.stop_id, is_told=False)
        if stop_id is not None:
            return actions + self._end(FinishReason.STOP, stop_id)
        if len(ids) >= placed.max_output:
            return actions + self._end(FinishReason.LENGTH)
        return actions

    def _fault(self, row: Arrived, placed: Placed) -> str | None:
        """Why this row cannot come from a node that works, or None."""
        first = len(self.journal.ids)
        if row.first != first:
            return f"tokens from {row.first}, expected {first}"
        if first + len(row.ids) > placed.max_output:
            return "more tokens than asked for"
        if row.finish not in (None, FinishReason.STOP, FinishReason.LENGTH):
            return f"finish {row.finish} in a row of tokens"
        if row.logprobs and len(row.logprobs) != len(row.ids):
            return "as many log-probabilities as tokens expected"
        if any(not 0 <= token < placed.vocabulary for token in row.ids):
            return "token outside the vocabulary"
        early = row.ids[:-1]
        if any(self._stops(token, first + n, placed) for n, token in enumerate(early)):
            return "tokens after a stop id"
        return None

    def _stops(self, token: int, index: int, placed: Placed) -> bool:
        return index >= self.journal.request.min_output and token in placed.stop_ids

    def _stop_id(self, placed: Placed) -> int | None:
        ids = self.journal.ids
        if ids and self._stops(ids[-1], len(ids) - 1, placed):
            return ids[-1]
        return None

    def _note_cached(self, cached: int) -> None:
        """Only the first placement's cache hits are usage; later ones are our own doing."""
        journal = self.journal
        if journal.cached_epoch is None:
            journal.cached_epoch = journal.epoch
        if journal.cached_epoch == journal.epoch:
            journal.cached = max(journal.cached, min(cached, len(journal.request.prompt)))

    def _on_closed(self, event: ClosedByNode, placed: Placed, now_ns: int) -> list[Action]:
        if event.code in FINAL_CODES:
            return self._fail_by_node(event.code, event.text, placed)
        match event.reason:
            case CloseReason.DEADLINE:
                return self._fail(ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed")
            case CloseReason.DRAIN:
                return self._hand_over(placed, now_ns)
            case CloseReason.FENCED | CloseReason.PREEMPT_FAILED | CloseReason.CANCELLED:
                return self._fail_over(f"closed by the node: {event.reason}", now_ns)
            case CloseReason.FINISHED | CloseReason.ERROR:
                why = f"closed by the node: {event.code or event.reason}"
                return self._fail_over(why, now_ns, is_blamed=event.code not in LANE_CODES)

    def _on_refused(self, event: RefusedByNode, placed: Placed, now_ns: int) -> list[Action]:
        if event.code is ErrorCode.SLO_UNATTAINABLE:
            return self._on_hopeless(event, placed)
        is_stale = event.code is ErrorCode.FENCED and self._stale_opens < STALE_OPENS_MAX
        self._stale_opens += is_stale
        if event.code in BUSY_CODES or is_stale:
            # Stale: this head slept, and opened with a stamp from before; the node's next word brings a fresh one.
            actions: list[Action] = [Postpone(placed.node, event.retry_after_ms)]
            actions += self._leave(f"refused: {event.code}")
            avoid = frozenset((placed.node,))
            return [*actions, Place(avoid, self.journal.moves > 0, f"refused: {event.code}")]
        if event.code in FINAL_CODES:
            return self._fail_by_node(event.code, event.text, placed)
        is_blamed = event.code is not ErrorCode.FENCED
        return self._fail_over(f"refused: {event.code}", now_ns, is_blamed=is_blamed)

    def _on_hopeless(self, event: RefusedByNode, placed: Placed) -> list[Action]:
        """Ask the nodes that have not said so yet: waiting does not help, or no longer than their word says."""
        hopeless = self.journal.hopeless
        hopeless[placed.node] = event.retry_after_ms or 0
        soonest_ms = min(hopeless.values()) or None
        verdict = NotPlaced(event.code, event.text, soonest_ms)
        actions = self._leave(f"refused: {event.code}")
        return [
            *actions,
            Place(frozenset(hopeless), self.journal.moves > 0, f"refused: {event.code}", verdict),
        ]

    def _fail_by_node(self, code: ErrorCode | None, text: str, placed: Placed) -> list[Action]:
        """Take a verdict that no other node would change."""
        if code is ErrorCode.CONTEXT_LENGTH_EXCEEDED and self.journal.ids:
            return self._end(FinishReason.LENGTH, is_told=False)
        what = text or f"refused by node {placed.node}"
        return self._fail(code or ErrorCode.INTERNAL, what, is_told=False)

    # --- what the head sees ---

    def _on_head(self, event: HeadInput, now_ns: int) -> list[Action]:
        match event:
            case Placed():
                return self._on_placed(event)
            case NodeLost():
                return self._on_lost(event, now_ns)
            case BootVerdict():
                return self._on_verdict(event)
            case Relieved() | Relinked():
                return self._on_planned(event, now_ns)
            case NotPlaced():
                return self._fail(event.code, event.text, retry_after_ms=event.retry_after_ms)
            case TooNarrow():
                return self._end(FinishReason.LENGTH)
            case ClientGone():
                return self._end(FinishReason.CANCELLED)
            case StopAt():
                del self.journal.ids[max(0, event.count) :]
                return self._end(FinishReason.STOP)
            case Tick():
                return self._on_tick(now_ns)

    def _on_placed(self, placed: Placed) -> list[Action]:
        assert self.phase is Phase.WAITING, "placed twice"
        self.phase = Phase.PLACED
        self.placement = placed
        self._is_taken = False
        self.journal.boots_lost.discard(placed.boot)
        return [SendOpen(self.journal.epoch, placed.max_output)]

    def _on_lost(self, event: NodeLost, now_ns: int) -> list[Action]:
        placed = self.placement
        if self.phase is not Phase.PLACED or placed is None or placed.link != event.link:
            return []
        if event.loss is Loss.CUT and self._is_taken:
            # Else its process did not have the request yet: when all nodes die at once, nobody died of it.
            self.journal.boots_suspected.add(placed.boot)
        is_told = event.loss in (Loss.HUNG, Loss.GOING)
        if event.loss is Loss.GOING:
            return self._hand_over(placed, now_ns)
        # A node that can still be reached over another link has the context cached.
        target = placed.node if event.loss is Loss.LINK else None
        return self._fail_over(event.loss.value, now_ns, is_told=is_told, target=target)

    def _on_planned(self, event: Relieved | Relinked, now_ns: int) -> list[Action]:
        """Move in peace: the target has seen the context, and until this instant the old placement was heard."""
        placed = self.placement
        if self.phase is not Phase.PLACED or placed is None:
            return []
        if (placed.link, self.journal.epoch) != (event.link, event.epoch):
            return []
        if isinstance(event, Relieved):
            return self._hand_over(placed, now_ns, event.target)
        self.journal.epoch += 1
        self.placement = replace(placed, link=event.fresh)
        return [SendOpen(self.journal.epoch, placed.max_output)]

    def _on_verdict(self, event: BootVerdict) -> list[Action]:
        journal = self.journal
        if not event.is_lost:
            journal.boots_lost.discard(event.boot)
        elif event.boot in journal.boots_suspected:
            journal.boots_lost.add(event.boot)
        journal.boots_suspected.discard(event.boot)
        return self._judge() if self.phase is Phase.JUDGING else []

    def _judge(self) -> list[Action]:
        """End a request that killed two processes; go on with one that did not; else keep waiting for the verdict."""
        journal = self.journal
        if len(journal.boots_lost) >= self._limits.processes_lost_max:
            text = "this request was running each time that a node's process died"
            return [Quarantine(), *self._fail(ErrorCode.REQUEST_QUARANTINED, text)]
        if self._are_processes_doubtful():
            return []
        assert self._pending_place is not None, "judging without a move to make"
        place, self._pending_place = self._pending_place, None
        self.phase = Phase.WAITING
        return [place]

    def _are_processes_doubtful(self) -> bool:
        doubtful = len(self.journal.boots_lost) + len(self.journal.boots_suspected)
        return doubtful >= self._limits.processes_lost_max

    def _on_tick(self, now_ns: int) -> list[Action]:
        deadline_ns = self.journal.request.deadline_ns
        if deadline_ns is not None and now_ns >= deadline_ns:
            return self._fail(ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed")
        start_by_ns = self.journal.request.start_by_ns
        if start_by_ns is not None and now_ns >= start_by_ns and not self.journal.has_started:
            return self._fail(ErrorCode.DEADLINE_EXCEEDED, "the request did not start in time")
        if self.phase is Phase.JUDGING and now_ns >= self._judge_until_ns:
            # Nobody answers where the process was: it is gone.
            self.journal.boots_lost |= self.journal.boots_suspected
            self.journal.boots_suspected.clear()
            return self._judge()
        return []

    # --- moving and ending ---

    def _fail_over(
        self,
        reason: str,
        now_ns: int,
        *,
        is_told: bool = False,
        is_blamed: bool = False,
        target: str | None = None,
    ) -> list[Action]:
        """Give up a failed placement: raise the epoch, leave, place again unless the limits forbid."""
        assert self.placement is not None, "a move needs a placement"
        node = self.placement.node
        actions: list[Action] = [Blame(node, reason)] if is_blamed else []
        actions += self._leave(reason, is_told=is_told)
        self.journal.failures += 1
        if self.journal.failures > self._limits.moves_max:
            text = f"moved {self._limits.moves_max} times, then: {reason}"
            return actions + self._fail(ErrorCode.MOVES_EXHAUSTED, text)
        return actions + self._move(node, reason, now_ns, target)

    def _hand_over(self, placed: Placed, now_ns: int, target: str | None = None) -> list[Action]:
        """Move away from a node that drains: no failure, but not a way to move for ever either."""
        self.journal.drains += 1
        if self.journal.drains > DRAINS_MAX:
            return self._fail_over("node draining", now_ns, is_told=True)
        actions = self._leave("node draining", is_told=True)
        return actions + self._move(placed.node, "node draining", now_ns, target)

    def _move(self, node: str, reason: str, now_ns: int, target: str | None = None) -> list[Action]:
        self.journal.moves += 1
        announce = Announce(self.journal.moves, reason)
        place = Place(frozenset((node,)), True, reason, target=target)
        if not self._are_processes_doubtful():
            return [announce, place]
        self.phase = Phase.JUDGING
        self._pending_place = place
        self._judge_until_ns = now_ns + JUDGE_MS_MAX * MS
        return [announce, *self._judge()]

    def _leave(self, reason: str, *, is_told: bool = False) -> list[Action]:
        """Give the placement up. The epoch rises first: from here on its rows are stale."""
        if self.placement is None:
            return []
        left = self.journal.epoch
        self.journal.epoch += 1
        self.placement = None
        self.phase = Phase.WAITING
        return [Leave(left, is_told, reason)]

    def _end(
        self, reason: FinishReason, stop_id: int | None = None, *, is_told: bool = True
    ) -> list[Action]:
        actions = self._leave(reason.value, is_told=is_told)
        self.phase = Phase.ENDED
        return [*actions, End(reason, stop_id)]

    def _fail(
        self,
        code: ErrorCode,
        text: str,
        *,
        is_told: bool = True,
        retry_after_ms: int | None = None,
    ) -> list[Action]:
        actions = self._leave(code.value, is_told=is_told)
        self.phase = Phase.ENDED
        return [*actions, Fail(code, text, retry_after_ms)]
