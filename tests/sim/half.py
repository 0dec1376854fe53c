"""Faults that stop half way: a frame whose rest never comes, a stream that ends one way while nobody reads the other.

Both leave the far process waiting for something that only its own deadline, or its own reading of the end, can settle. They work on
what `Faults` has drawn and, like every fault, say for how long they last.
"""

from __future__ import annotations

from tests.sim.head import SimHead
from tests.sim.lies import Scene
from tests.sim.network import End, Item
from tests.sim.stream import FIN
from tests.sim.world import MS, SECOND

DARK_S = 32
STUCK_MS = 300
BROKEN_S = 3


def half_frame(scene: Scene, ends: tuple[End, End] | None) -> int | None:
    """The first bytes of the head's next frame, then its machine loses power: nobody ends the stream."""
    if ends is None or ends[0].pipe is None or ends[0].pipe.corrupt is not None:
        return None
    pipe, host, share = ends[0].pipe, ends[0].host, scene.drawn.random()
    head = next(head for head in scene.heads if head.host == host)

    def swallow(_data: bytes) -> list[Item]:
        pipe.corrupt = swallow
        return []

    def cut(data: bytes) -> list[Item]:
        scene.count("half frames")
        pipe.corrupt = swallow
        scene.world.after(0, lambda: _darken(scene, head))
        return [data[: max(1, min(len(data) - 1, int(len(data) * share)))]]

    pipe.corrupt = cut
    return (DARK_S + 10) * SECOND


def _darken(scene: Scene, head: SimHead) -> None:
    if head.is_up:
        head.crash(power=True)
        scene.count("head deaths")
        scene.world.after(DARK_S * SECOND, lambda: None if head.is_up else head.start())


def half_close(scene: Scene, ends: tuple[End, End] | None) -> int | None:
    """The node's side of a connection reads no more, then ends its own way, and is reset only later."""
    if ends is None or ends[1].pipe is None:
        return None
    far = ends[1]

    def end() -> None:
        if not far.is_gone and far.pipe is not None:
            scene.count("half closed")
            far.pipe.send(FIN)

    far.is_stuck = True
    scene.world.after(STUCK_MS * MS, end)
    scene.world.after(BROKEN_S * SECOND, lambda: far.break_with(ConnectionResetError("reset")))
    return (BROKEN_S + 1) * SECOND
