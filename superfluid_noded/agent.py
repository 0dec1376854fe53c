"""The node's side of its links: what heads say becomes inputs of the scheduler.

One object for all links of the process; everything runs on the event loop, between awaits. It decides nothing about lanes or
tokens (the scheduler), shapes of messages (the wire), epochs and leases (`sessions.py`): it carries words. Effects go the
other way in `teller.py`. Every accepted OPEN gets OPENED and exactly one end, unless its link is lost; a refused one gets
REFUSE. A link that is lost or cannot take its frames loses its sessions at once: nobody could read them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from superfluid_core.clock import MS, Clock
from superfluid_core.errors import ErrorCode, RemoteProtocolError
from superfluid_core.limits import LinkLimits, WireLimits
from superfluid_core.link.link import Link
from superfluid_core.logs import log
from superfluid_core.scheduler.plan import Cancel, Drain, Input, SetQos, Submit
from superfluid_core.session import QosClass, SessionKey, SessionSpec
from superfluid_core.wire.messages import (
    CancelSession,
    Closed,
    CloseReason,
    DrainOrder,
    Embed,
    Goaway,
    Hello,
    Message,
    Open,
    Pin,
    Refuse,
    Renew,
    SetClass,
    Unpin,
    Welcome,
)
from superfluid_core.wire.notes import TIMING, Trace
from superfluid_noded.answers import NodeCard
from superfluid_noded.heads import Head, Live, Roster
from superfluid_noded.judge import Denial, judge_open
from superfluid_noded.pins import Pins
from superfluid_noded.sessions import LeaseLimits, SessionTable, Verdict

logger = logging.getLogger(__name__)

DRAIN_RETRY_MS = 1_000
RATE_RETRY_MS = 100
NO_EMBEDDINGS = Denial(ErrorCode.UNSUPPORTED, "no engine of this node has embeddings")

_VERDICTS = {
    Verdict.STALE_EPOCH: ErrorCode.FENCED,
    Verdict.FENCED: ErrorCode.FENCED,
    Verdict.FUTURE_STAMP: ErrorCode.FENCED,
    Verdict.FULL: ErrorCode.SESSION_LIMIT,
}


class Observer(Protocol):
    """Who counts what passes by (metrics.py)."""

    def queue_waited(self, qos: QosClass, seconds: float) -> None: ...

    def first_token(self, qos: QosClass, seconds: float) -> None: ...

    def next_token(self, qos: QosClass, seconds: float) -> None: ...

    def tokens(self, tenant: str, kind: str, count: int) -> None: ...

    def refused(self, code: ErrorCode) -> None: ...

    def ended(self, finish: str) -> None: ...


class Agent:
    """Hears heads. `submit` reaches the schedulers; `on_change` is called when the load has changed.

    `pins` holds the pins of each model's cache, by every name of the model.
    """

    def __init__(
        self,
        card: NodeCard,
        clock: Clock,
        observer: Observer,
        submit: Callable[..., None],
        limits: LinkLimits,
        pins: Mapping[str, Pins],
    ) -> None:
        self.card = card
        self.limits = limits
        self.pins = pins
        self.roster = Roster(
            SessionTable(LeaseLimits(card.sessions_per_link_max, limits.lease_ttl_max_ms))
        )
        self.drain_until_ns: int | None = None
        self._is_leaving = False
        self.on_change: Callable[[], None] = lambda: None
        self.on_trace: Callable[[Live, str], None] = lambda _live, _context: None
        self.on_embed: Callable[[Head, Embed], Denial | None] = lambda _head, _message: (
            NO_EMBEDDINGS
        )
        self._clock = clock
        self._observer = observer
        self._submit = submit
        self._text_chars_max = WireLimits().text_chars_max

    @property
    def is_draining(self) -> bool:
        return self.drain_until_ns is not None

    # --- links ------------------------------------------------------------------------------------

    def welcome(self, hello: Hello) -> Welcome | Refuse:
        """Answer the first frame of a link."""
        if self._is_leaving:
            return Refuse(ErrorCode.DRAINING, "this node is leaving", DRAIN_RETRY_MS)
        names = [head.name for head in self.roster.heads.values()]
        if hello.head not in names and len(set(names)) >= self.limits.heads_max:
            return Refuse(ErrorCode.OVERLOADED, "too many heads are linked to this node")
        if names.count(hello.head) >= self.limits.links_per_head_max:
            return Refuse(ErrorCode.OVERLOADED, "too many links of this head")
        return self.card.welcome(hello, self.limits, self._clock.boot_ns())

    def attach(self, link: Link) -> Head:
        """Take in an established link."""
        assert isinstance(link.peer, Hello), "a node's peer says HELLO"
        head = self.roster.admit(link, link.peer.head)
        head.wants_timing = TIMING in link.peer.features
        link.on_backlog = self.end_lapsed
        log(logger, "info", "head linked", head=head.name, remote=link.remote)
        if self.is_draining:
            self.on_change()
        return head

    def detach(self, head: Head, reason: str) -> None:
        """Forget a link and cancel what it had: its frames have nowhere to go."""
        self.roster.heads.pop(head.number, None)
        lost = [live for live in self.roster.live.values() if live.head is head]
        for live in lost:
            self.roster.forget(live, "link-lost", purge=False)
            self._observer.ended("link-lost")
        if lost:
            self._submit(*(Cancel(live.run_key) for live in lost))
        log(logger, "info", "head gone", head=head.name, reason=reason, sessions=len(lost))
        self.on_change()

    def receive(self, head: Head, message: Message) -> None:
        """Handle one message about sessions (asks are the service's). Raises RemoteProtocolError."""
        match message:
            case Open():
                self._open(head, message)
            case CancelSession():
                self._cancel(head, message)
            case SetClass():
                self._set_class(head, message)
            case Trace():
                head.trace = message
            case Renew():
                self._renew(head, message.stamp_ns)
            case Pin():
                self._pin(head, message)
            case Unpin():
                self._unpin(head, message)
            case Embed():
                self._embed(head, message)
            case DrainOrder():
                self._order(head, message.grace_ms)
            case _:
                return

    # --- sessions ---------------------------------------------------------------------------------

    def _open(self, head: Head, message: Open) -> None:
        judged = self._judge(head, message)
        if isinstance(judged, Denial):
            self._refuse(head, message.session, message.epoch, judged)
            return
        key = judged.key
        lease = (message.lease_stamp_ns, message.lease_ttl_ms)
        opening = self.roster.table.open(
            key, message.epoch, head.number, lease, self._clock.boot_ns()
        )
        placement = opening.placement
        if placement is None:
            denial = Denial(_VERDICTS[opening.verdict], opening.verdict.value)
            self._refuse(head, message.session, message.epoch, denial)
            return
        inputs: list[Input] = []
        if opening.superseded is not None:
            inputs += self._supersede(self.roster.live[opening.superseded.serial])
        now_ns = self._clock.now_ns()
        outputs = len(judged.delivered)
        live = Live(placement, head, judged.qos, judged.tenant, now_ns, now_ns, outputs)
        live.delivered = outputs
        noted, head.trace = head.trace, None
        if noted is not None and (noted.session, noted.epoch) == (live.number, live.epoch):
            self.on_trace(live, noted.context)
        self.roster.live[placement.serial] = live
        inputs.append(Submit(replace(judged, key=live.run_key)))
        self._submit(*inputs)
        self.on_change()

    def _judge(self, head: Head, message: Open) -> SessionSpec | Denial:
        now_ns = self._clock.now_ns()
        if self.is_draining:
            return Denial(ErrorCode.DRAINING, "this node is draining", DRAIN_RETRY_MS)
        if not head.opens.take(now_ns):
            return Denial(ErrorCode.RATE_LIMIT_EXCEEDED, "too many OPENs a second", RATE_RETRY_MS)
        key = SessionKey(head.name, message.session)
        model = self.card.model(message.model)
        return judge_open(message, None if model is None else model.info, key, now_ns)

    def _embed(self, head: Head, message: Embed) -> None:
        """Have a text embedded; it is no session, and what refuses it is told like one."""
        denial: Denial | None = Denial(ErrorCode.DRAINING, "this node is draining", DRAIN_RETRY_MS)
        if not self.is_draining:
            denial = self.on_embed(head, message)
        if denial is not None:
            self._refuse(head, message.session, 0, denial)

    def _supersede(self, old: Live) -> list[Input]:
        """End an older placement of the same session; its head has raised the epoch and wants no word of it."""
        self.roster.forget(old, "superseded", purge=True)
        self._observer.ended("superseded")
        return [Cancel(old.run_key)]

    def _refuse(self, head: Head, session: int, epoch: int, denial: Denial) -> None:
        self._observer.refused(denial.code)
        text = denial.text[: self._text_chars_max]
        fields = {"head": head.name, "session": session, "code": denial.code}
        log(logger, "info", "session refused", **fields, text=text)
        answer = Refuse(denial.code, text, denial.retry_after_ms, session, epoch)
        self.roster.send(head, (answer,))

    def _find(self, head: Head, session: int, epoch: int) -> Live | None:
        key = SessionKey(head.name, session)
        placement = self.roster.table.find(key, epoch, head.number)
        return None if placement is None else self.roster.live[placement.serial]

    def _cancel(self, head: Head, message: CancelSession) -> None:
        live = self._find(head, message.session, message.epoch)
        if live is not None:
            head.link.purge(message.session, message.epoch)
            self._submit(Cancel(live.run_key))

    def _set_class(self, head: Head, message: SetClass) -> None:
        live = self._find(head, message.session, message.epoch)
        if live is not None:
            live.qos = message.qos
            self._submit(SetQos(live.run_key, message.qos))

    def _renew(self, head: Head, stamp_ns: int) -> None:
        if not self.roster.table.renew(head.number, stamp_ns, self._clock.boot_ns()):
            raise RemoteProtocolError("RENEW with a stamp that this node has not made")

    def _pin(self, head: Head, message: Pin) -> None:
        pins = self.pins.get(message.model)
        if pins is None:
            raise RemoteProtocolError("PIN for a model that this node does not serve")
        kept = pins.pin(head.name, message.hashes, message.ttl_ms, self._clock.now_ns())
        fields = {"head": head.name, "model": message.model, "blocks": kept}
        fields["ttl_ms"] = message.ttl_ms
        log(logger, "info", "prefix pinned", **fields, refused=len(message.hashes) - kept)

    def _unpin(self, head: Head, message: Unpin) -> None:
        pins = self.pins.get(message.model)
        if pins is not None:
            pins.unpin(head.name, message.hashes)

    def end_pins(self) -> None:
        """Let go of prefixes whose pins have ended."""
        for pins in self.pins.values():
            pins.expire(self._clock.now_ns())

    # --- ends that the node decides ---------------------------------------------------------------

    def end(self, doomed: Iterable[Live], reason: CloseReason, code: ErrorCode) -> None:
        """Close sessions from this side, with their queued frames withdrawn."""
        cancels: list[Input] = []
        for live in list(doomed):
            if not self.roster.forget(live, reason.value, purge=True):
                continue
            self._observer.ended(reason.value)
            closed = Closed(live.number, live.epoch, reason, code, reason.value)
            self.roster.send(live.head, (closed,))
            fields = {"head": live.head.name, "session": live.number, "epoch": live.epoch}
            log(logger, "warning", "session closed by the node", **fields, reason=reason.value)
            cancels.append(Cancel(live.run_key))
        if cancels:
            self._submit(*cancels)
            self.on_change()

    def end_lapsed(self) -> None:
        """Fence what has outlived its lease."""
        lapsed = self.roster.table.expire(self._clock.boot_ns())
        if lapsed:
            doomed = [self.roster.live[placement.serial] for placement in lapsed]
            self.end(doomed, CloseReason.FENCED, ErrorCode.FENCED)

    def _order(self, head: Head, grace_ms: int | None) -> None:
        """Follow a head's DRAIN. Any head may end what any head began: they are one operator's."""
        if grace_ms is None:
            log(logger, "info", "drain ended", head=head.name)
            self.undrain()
        else:
            log(logger, "info", "drain ordered", head=head.name, grace_ms=grace_ms)
            self.drain(grace_ms)

    def undrain(self) -> None:
        """Take sessions again, unless the node itself is leaving."""
        if self._is_leaving or self.drain_until_ns is None:
            return
        self.drain_until_ns = None
        self._submit(Drain(is_over=True))
        self.on_change()

    def drain(self, grace_ms: int, *, leaving: bool = False) -> None:
        """Refuse new sessions from now on; what runs may run for `grace_ms`. A second order can only shorten it.

        A node that is `leaving` says GOAWAY; one that was only told to drain keeps its links, takes new ones and says so in STATUS.
        """
        if leaving:
            self._is_leaving = True
            for head in list(self.roster.heads.values()):
                self.roster.send(head, (Goaway("draining"),))
        until_ns = self._clock.now_ns() + grace_ms * MS
        if self.drain_until_ns is not None:
            self.drain_until_ns = min(self.drain_until_ns, until_ns)
            return
        self.drain_until_ns = until_ns
        self._submit(Drain())
        self.on_change()

    def end_drained(self) -> None:
        """Close what has outlived the grace of a drain."""
        if self.drain_until_ns is None or self._clock.now_ns() < self.drain_until_ns:
            return
        self.end(self.roster.live.values(), CloseReason.DRAIN, ErrorCode.DRAINING)
