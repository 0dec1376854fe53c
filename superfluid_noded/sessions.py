"""Who may still speak: the table of placements, their epochs and their leases. Pure.

A placement is (head, session, epoch) on one link. Per (head, session) at most one placement is live, epochs only rise, and an
ended or fenced placement never revives: its epoch stays behind as a tombstone, in bounded number. A lease counts from a stamp that *this
node* made on CLOCK_BOOTTIME and that the head echoed, so neither delay nor suspend can stretch it. It is judged directly before a frame is
queued (`may_emit`) and by a sweep (`expire`). An evicted tombstone is harmless: an OPEN that old also carries a stamp that old.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from superfluid_core.session import SessionKey

MS_NS = 1_000_000


class Verdict(StrEnum):
    """What became of an OPEN."""

    ACCEPTED = "accepted"
    STALE_EPOCH = "stale epoch"
    FENCED = "the lease stamp is older than the lease"
    FUTURE_STAMP = "the lease stamp is from the future"
    FULL = "too many sessions on this link"


@dataclass(slots=True, eq=False)
class Placement:
    """One live placement. `serial` is unique in this process and names it towards the scheduler."""

    key: SessionKey
    epoch: int
    link: int
    serial: int
    ttl_ns: int
    lease_until_ns: int
    is_fenced: bool = False


class Opening(NamedTuple):
    """The answer to an OPEN. `superseded` is the older placement of the same session, which has to be cancelled."""

    verdict: Verdict
    placement: Placement | None = None
    superseded: Placement | None = None


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Bounds of the table."""

    per_link_max: int
    ttl_ms_max: int
    tombstones_max: int = 16_384


class SessionTable:
    """All placements of a node. Times are nanoseconds of CLOCK_BOOTTIME, passed in."""

    def __init__(self, limits: LeaseLimits) -> None:
        self._limits = limits
        self._live: dict[SessionKey, Placement] = {}
        self._by_link: dict[int, dict[SessionKey, Placement]] = {}
        self._epochs: dict[SessionKey, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Placement]:
        return iter(self._live.values())

    def on_link(self, link: int) -> int:
        """Count the live placements of `link`."""
        return len(self._by_link.get(link, ()))

    def find(self, key: SessionKey, epoch: int, link: int) -> Placement | None:
        """Return the live placement that was opened as `epoch` on `link`; stale names find nothing."""
        placement = self._live.get(key)
        if placement is None or placement.epoch != epoch or placement.link != link:
            return None
        return placement

    def open(
        self, key: SessionKey, epoch: int, link: int, lease: tuple[int, int], now_ns: int
    ) -> Opening:
        """Judge an OPEN; `lease` is (stamp in ns, ttl in ms). On ACCEPTED the placement is live.

        Whatever the verdict, this epoch is spent: the same OPEN again is stale.
        """
        known = self._epochs.get(key)
        if known is not None and epoch <= known:
            return Opening(Verdict.STALE_EPOCH)
        old = self._live.get(key)
        stamp_ns, ttl_ns = lease[0], min(lease[1], self._limits.ttl_ms_max) * MS_NS
        verdict = self._verdict(old, link, (stamp_ns, ttl_ns), now_ns)
        if verdict is not Verdict.ACCEPTED:
            self._remember(key, epoch)
            return Opening(verdict)
        if old is not None:
            self.close(old)
        self._serial += 1
        placement = Placement(key, epoch, link, self._serial, ttl_ns, stamp_ns + ttl_ns)
        self._live[key] = placement
        self._by_link.setdefault(link, {})[key] = placement
        self._remember(key, epoch)
        return Opening(Verdict.ACCEPTED, placement, old)

    def _verdict(
        self, old: Placement | None, link: int, lease: tuple[int, int], now_ns: int
    ) -> Verdict:
        """Judge what is asked for beside its epoch; `lease` is (stamp, ttl), both in ns."""
        stamp_ns, ttl_ns = lease
        if stamp_ns > now_ns:
            return Verdict.FUTURE_STAMP
        if now_ns >= stamp_ns + ttl_ns:
            return Verdict.FENCED
        frees = old is not None and old.link == link
        is_full = self.on_link(link) - frees >= self._limits.per_link_max
        return Verdict.FULL if is_full else Verdict.ACCEPTED

    def renew(self, link: int, stamp_ns: int, now_ns: int) -> bool:
        """Extend the leases of `link`; False when the stamp cannot be ours. A lapsed lease stays lapsed."""
        if stamp_ns > now_ns:
            return False
        for placement in self._by_link.get(link, {}).values():
            if not placement.is_fenced and now_ns < placement.lease_until_ns:
                placement.lease_until_ns = max(
                    placement.lease_until_ns, stamp_ns + placement.ttl_ns
                )
        return True

    def may_emit(self, placement: Placement, now_ns: int) -> bool:
        """Judge the lease directly before a frame is queued; an expired one is fenced for good."""
        if placement.is_fenced or self._live.get(placement.key) is not placement:
            return False
        if now_ns >= placement.lease_until_ns:
            placement.is_fenced = True
            return False
        return True

    def expire(self, now_ns: int) -> list[Placement]:
        """Fence and return every placement whose lease has run out; the caller closes them."""
        lapsed = [placement for placement in self if now_ns >= placement.lease_until_ns]
        for placement in lapsed:
            placement.is_fenced = True
        return lapsed

    def close(self, placement: Placement) -> bool:
        """Forget a live placement, keeping its epoch; False when it was closed before."""
        if self._live.get(placement.key) is not placement:
            return False
        del self._live[placement.key]
        of_link = self._by_link[placement.link]
        del of_link[placement.key]
        if not of_link:
            del self._by_link[placement.link]
        return True

    def close_link(self, link: int) -> list[Placement]:
        """Close and return what `link` had."""
        lost = list(self._by_link.get(link, {}).values())
        for placement in lost:
            self.close(placement)
        return lost

    def _remember(self, key: SessionKey, epoch: int) -> None:
        """Keep the highest epoch, newest last; drop the oldest that is not live when there are too many."""
        self._epochs.pop(key, None)
        self._epochs[key] = epoch
        excess = len(self._epochs) - len(self._live) - self._limits.tombstones_max
        if excess <= 0:
            return
        ended = (known for known in self._epochs if known not in self._live)
        for known in tuple(islice(ended, excess)):
            del self._epochs[known]
