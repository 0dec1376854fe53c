"""What can go wrong, kind by kind, drawn from a seed.

A fault is a method that does its harm, sees to its own end, and says for how long it lasts (None: nothing here to harm just now).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from superfluid_core.link.link import LinkClosedError
from superfluid_core.wire.messages import Open
from superfluid_noded.heads import OPENS_BURST, OPENS_PER_SECOND
from tests.sim.half import half_close, half_frame
from tests.sim.head import SimHead
from tests.sim.lies import FORGERIES, Scene
from tests.sim.network import FIN, End, Item
from tests.sim.node import SimNode
from tests.sim.world import MS, SECOND

CALM = ("pause head", "pause node", "jitter")


Fault = Callable[[], int | None]


class Faults:
    """Does harm. Durations are drawn from short lists: boundaries of the product's own timers lie between them."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.world = scene.world
        self.network = scene.network
        self.drawn = scene.drawn
        self.longest_s = 1e9
        self.table: dict[str, Fault] = {
            "crash": self.crash,
            "power loss": lambda: self.crash(power=True),
            "crash loop": self.crash_loop,
            "freeze node": self.freeze_node,
            "pause node": self.pause_node,
            "freeze head": lambda: self.freeze_head((0.2, 1.5, 4.0, 9.0, 15.0, 40.0)),
            "pause head": lambda: self.freeze_head((1.2, 2.5, 3.5, 4.5)),
            "partition": lambda: self.block(to_node=True, to_head=True),
            "half to node": lambda: self.block(to_node=True),
            "half to head": lambda: self.block(to_head=True),
            "reset": self.reset,
            "duplicate link": lambda: self.half_reset(at_head=True),
            "deaf node": lambda: self.half_reset(at_head=False),
            "flip": self.flip,
            "raw flip": self.raw_flip,
            "truncate": self.truncate,
            "delay": lambda: self.delay((0.3, 1.2, 2.5, 5.0)),
            "jitter": lambda: self.delay((0.02, 0.1, 0.3)),
            "late OPEN": self.late_open,
            "stale OPEN": self.stale_open,
            "hang": self.hang,
            "slow engine": self.slow_engine,
            "lane fault": self.lane_fault,
            "drain": self.drain,
            "terminate": self.terminate,
            "goaway race": self.goaway_race,
            "boot jump": self.boot_jump,
            "starve leases": self.starve_leases,
            "busy": self.busy,
            "wrong weights": self.wrong_weights,
            "head crash": self.head_crash,
            "head power loss": lambda: self.head_crash(power=True),
            "faulty node": self.faulty_node,
            "burst": self.burst,
            "half frame": lambda: half_frame(self.scene, self._link()),
            "half close": self.half_close,
        }

    def strike(self, kind: str) -> bool:
        lasts_ns = self.table[kind]()
        if lasts_ns is None:
            return False
        scene = self.scene
        scene.count(f"fault: {kind}")
        scene.busy_until_ns = max(scene.busy_until_ns, self.world.now_ns + lasts_ns)
        return True

    # --- choosing -----------------------------------------------------------------------------------

    def _node(self) -> SimNode | None:
        up = self.scene.up_nodes()
        if not up:
            return None
        loaded = [node for node in up if node.node is not None and node.node.agent.roster.live]
        return self.drawn.choice(loaded if loaded and self.drawn.random() < 0.8 else up)

    def _head(self) -> SimHead | None:
        up = [head for head in self.scene.heads if head.is_up]
        return self.drawn.choice(up) if up else None

    def _ns(self, *seconds: float) -> int:
        drawn_s = self.drawn.choice(seconds) * (0.8 + 0.4 * self.drawn.random())
        return int(min(drawn_s, self.longest_s) * SECOND)

    def _link(self) -> tuple[End, End] | None:
        """Both ends of a connection: the head's, the node's."""
        head, node = self._head(), self._node()
        if head is None or node is None:
            return None
        ends = self.network.connections(head.host, node.host)
        ends = [end for end in ends if end.peer is not None and not end.peer.is_gone]
        if not ends or ends[-1].peer is None:
            return None
        return ends[-1], ends[-1].peer

    def crowd(self, head: SimHead, count: int) -> None:
        """Let clients come at once; never more than can be served within the liveness bound."""
        lanes = sum(node.options.lanes for node in self.scene.nodes)
        for _ in range(min(count, 2 * lanes + 2 - len(head.open))):
            head.ask(self.scene.load)

    # --- processes ----------------------------------------------------------------------------------

    def crash(self, *, power: bool = False) -> int | None:
        node = self._node()
        if node is None:
            return None
        node.crash(power=power)
        self.scene.count("dark", int(power))
        return self._restart(node, self._ns(0.3, 2.0, 6.0, 20.0))

    def _restart(self, node: SimNode, after_ns: int) -> int:
        starts = node.starts
        node.is_resting = True  # the supervisor leaves it to us

        def restart() -> None:
            if node.starts == starts:
                node.is_resting = False
                node.start()

        self.world.after(after_ns, restart)
        return after_ns

    def crash_loop(self) -> int | None:
        node = self._node()
        if node is None:
            return None
        at_ns = 0
        for _ in range(4):
            self.world.after(at_ns, node.crash)
            self.world.after(at_ns + self._ns(0.2), node.start)
            at_ns += self._ns(1.0, 2.0, 4.0)
        return at_ns

    def freeze_node(self) -> int | None:
        node = self._node()
        if node is None or node.process is None:
            return None
        lasts_ns = self._ns(0.1, 0.8, 1.5, 3.2, 6.0, 11.0, 25.0, 60.0)
        node.process.freeze(lasts_ns)
        return lasts_ns

    def pause_node(self) -> int | None:
        node = self._node()
        if node is None or node.process is None:
            return None
        self.scene.count("node paused")
        node.process.freeze(self._ns(0.1, 0.5, 1.0))
        return SECOND

    def freeze_head(self, seconds: tuple[float, ...]) -> int | None:
        head = self._head()
        if head is None or head.process is None:
            return None
        lasts_ns = self._ns(*seconds)
        self.scene.count("head overslept", int(lasts_ns > 1_150 * MS))
        head.process.freeze(lasts_ns)
        return lasts_ns

    def head_crash(self, *, power: bool = False) -> int | None:
        head = self._head()
        if head is None:
            return None
        head.crash(power=power)
        self.scene.count("head deaths")
        lasts_ns = self._ns(0.5, 3.0, 14.0)
        self.world.after(lasts_ns, head.start)
        return lasts_ns

    # --- network ------------------------------------------------------------------------------------

    def block(self, *, to_node: bool = False, to_head: bool = False) -> int | None:
        head, node = self._head(), self._node()
        if head is None or node is None:
            return None
        lasts_ns = self._ns(0.5, 2.0, 4.0, 8.0, 12.0, 30.0)
        ways = [(head.host, node.host)] if to_node else []
        ways += [(node.host, head.host)] if to_head else []
        for way in ways:
            self._block(way, lasts_ns)
        return lasts_ns

    def _block(self, way: tuple[str, str], lasts_ns: int) -> None:
        self.network.block(*way, is_blocked=True)
        self.world.after(lasts_ns, lambda: self.network.block(*way, is_blocked=False))

    def reset(self) -> int | None:
        ends = self._link()
        if ends is None:
            return None
        self.scene.count("resets")
        for end in ends:
            end.break_with(ConnectionResetError("connection reset by peer"))
        return 0

    def half_reset(self, *, at_head: bool) -> int | None:
        ends = self._link()
        if ends is None:
            return None
        self.scene.count("resets")
        ends[0 if at_head else 1].break_with(ConnectionResetError("reset"), is_mute=True)
        return SECOND

    def _corrupt(self, change: Callable[[bytes, End], list[Item]]) -> int | None:
        ends = self._link()
        if ends is None:
            return None
        sender = self.drawn.choice(ends)
        if sender.pipe is None or sender.pipe.corrupt is not None:
            return None
        sender.pipe.corrupt = lambda data: change(data, sender)
        return SECOND

    def flip(self) -> int | None:
        def change(data: bytes, sender: End) -> list[Item]:
            self.scene.count("flipped")
            self._reset_soon(sender)
            return [OSError("TLS: bad record mac")]

        return self._corrupt(change)

    def raw_flip(self) -> int | None:
        place, bit = self.drawn.randrange(8), 1 << self.drawn.randrange(8)

        def change(data: bytes, _: End) -> list[Item]:
            self.scene.count("flipped raw")
            return [data[:place] + bytes((data[place] ^ bit,)) + data[place + 1 :]]

        lasts_ns = self._corrupt(change)
        return None if lasts_ns is None else lasts_ns + 21 * SECOND

    def truncate(self) -> int | None:
        share = self.drawn.random()

        def change(data: bytes, sender: End) -> list[Item]:
            self.scene.count("truncated")
            self._reset_soon(sender)
            return [data[: int(len(data) * share)], FIN]

        return self._corrupt(change)

    def half_close(self) -> int | None:
        ends = self._link()
        lasts_ns = half_close(self.scene, ends)
        if lasts_ns is not None and ends is not None:
            head = next(head for head in self.scene.heads if head.host == ends[0].host)
            self.crowd(head, 2)
        return lasts_ns

    def _reset_soon(self, end: End) -> None:
        self.world.after(MS, lambda: end.break_with(ConnectionResetError("reset")))

    def delay(self, seconds: tuple[float, ...]) -> int | None:
        head, node = self._head(), self._node()
        if head is None or node is None:
            return None
        lasts_ns = self._ns(1.0, 5.0, 15.0)
        ways = [(head.host, node.host), (node.host, head.host)]
        for way in self.drawn.sample(ways, self.drawn.choice((1, 2))):
            route = self.network.route(*way)
            route.extra_ns = self._ns(*seconds)
            self.world.after(lasts_ns, partial(setattr, route, "extra_ns", 0))
        self.scene.count("delayed")
        return lasts_ns

    def late_open(self) -> int | None:
        """An OPEN that arrives after its lease: the way to the node is blocked, the way back is not."""
        head, node = self._head(), self._node()
        if head is None or node is None:
            return None
        lasts_ns = self._ns(11.0, 13.0)
        self._block((head.host, node.host), lasts_ns)
        self.crowd(head, 2 + 2 * len(self.scene.nodes))
        return lasts_ns

    def stale_open(self) -> int | None:
        """An OPEN of a placement that is over comes again."""
        head, node = self._head(), self._node()
        if head is None or node is None or head.fleet is None or node.node is None:
            return None
        agent = node.node.agent
        running = head.fleet._runner.generations
        known = [
            each
            for owner, name, each in self.scene.checks.received
            if (owner, name) == (agent, head.name)
            and (
                each.session not in running
                or running[each.session].machine.journal.epoch > each.epoch
            )
        ]
        book = head.book(node)
        standing = None if book is None else book.standing
        if not known or standing is None or head.process is None or head.process.is_frozen:
            return None
        again: Open = replace(self.drawn.choice(known), lease_stamp_ns=standing.stamp_ns)
        try:
            head.process.call(standing.link.send, again)
        except LinkClosedError:
            return None
        return 0

    # --- engines and nodes --------------------------------------------------------------------------

    def hang(self) -> int | None:
        node = self._node()
        if node is None or node.process is None:
            return None
        lasts_ns = self._ns(2.0, 7.0, 12.0, 40.0)
        node.ills.hung_until_ns = node.process.now_ns() + lasts_ns
        return lasts_ns

    def slow_engine(self) -> int | None:
        node = self._node()
        if node is None:
            return None
        lasts_ns = self._ns(5.0, 20.0)
        ills = node.ills
        ills.slow = 20
        self.scene.count("slowed")
        self.world.after(lasts_ns, partial(setattr, ills, "slow", 1))
        return lasts_ns

    def lane_fault(self) -> int | None:
        node = self._node()
        if node is None:
            return None
        node.ills.lane_faults += self.drawn.choice((1, 1, 3))
        return 0

    def drain(self) -> int | None:
        head, node = self._head(), self._node()
        if head is None or node is None or head.fleet is None or head.process is None:
            return None
        book = head.book(node)
        if book is None:
            return None
        head.process.call(head.fleet.drain, book.key, self.drawn.choice((0, 500, 3_000)))
        return self._restart(node, self._ns(5.0, 15.0))

    def terminate(self) -> int | None:
        node = self._node()
        if node is None:
            return None
        node.terminate()
        return 20 * SECOND

    def goaway_race(self) -> int | None:
        head, node = self._head(), self._node()
        if head is None or node is None or head.process is None or head.process.is_frozen:
            return None
        self.crowd(head, 2 * len(self.scene.nodes))
        route = self.network.route(head.host, node.host)
        self.world.after(self.drawn.randrange(max(1, route.latency_ns)), node.terminate)
        return 20 * SECOND

    def boot_jump(self) -> int | None:
        node = self._node()
        if node is None or node.process is None:
            return None
        node.boot_offset_ns += self._ns(3.0, 12.0, 60.0)
        node.process.boot_offset_ns = node.boot_offset_ns
        return 0

    def starve_leases(self) -> int | None:
        head, node = self._head(), self._node()
        if head is None or node is None:
            return None
        lasts_ns = self._ns(6.0, 15.0)
        self.scene.starved[(head.name, node.identity)] = self.world.now_ns + lasts_ns
        return lasts_ns

    def busy(self) -> int | None:
        node = self._node()
        if node is None or node.node is None or node.process is None:
            return None
        lasts_ns = self._ns(1.0, 5.0)
        full_ns = node.process.now_ns() + lasts_ns + OPENS_BURST * SECOND // OPENS_PER_SECOND
        for head in node.node.agent.roster.heads.values():
            head.opens.full_ns = full_ns
        return lasts_ns

    def wrong_weights(self) -> int | None:
        node = self._node()
        if node is None:
            return None
        node.options = replace(node.right_options, seed=1)
        node.start()
        lasts_ns = self._ns(5.0, 20.0)

        def restore() -> None:
            node.options = node.right_options
            node.start()

        self.world.after(lasts_ns, restore)
        return lasts_ns

    def faulty_node(self) -> int | None:
        node = self._node()
        if node is None:
            return None
        node.faulty = self.drawn.choice(FORGERIES)
        lasts_ns = self._ns(0.5, 2.0)
        self.world.after(lasts_ns, partial(setattr, node, "faulty", ""))
        return lasts_ns

    def burst(self) -> int | None:
        head = self._head()
        if head is None or head.fleet is None:
            return None
        self.scene.count("bursts")
        self.crowd(head, self.drawn.choice((2, 6)) * len(self.scene.nodes))
        return 5 * SECOND
