"""The vocabulary of one choice's life: what can happen to it, and what is to be done about it.

Inputs are named after what was seen, actions after what the shell has to do. Those that a node caused carry the link on
which they came (a number that the head gave it) and the epoch: `generation.py` judges by these two alone, never by time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from superfluid_core.errors import ErrorCode
from superfluid_core.session import FinishReason, TokenLogprobs
from superfluid_core.wire.messages import CloseReason

# --- what can happen ------------------------------------------------------------------------------


class Loss(StrEnum):
    """Why a placement is lost with its node. Only CUT may mean that the node's process died."""

    CUT = "link cut"
    SILENT = "node silent"
    HUNG = "engine hung"
    GOING = "node going away"
    LINK = "one of its links lost"


@dataclass(frozen=True, slots=True)
class Placed:
    """The shell reserved a node: `stop_ids` is the complete set that ends the session there."""

    node: str
    boot: str
    link: int
    weights: str
    vocabulary: int
    stop_ids: frozenset[int]
    max_output: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """OPENED came."""

    link: int
    epoch: int
    cached: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """PROGRESS came."""

    link: int
    epoch: int
    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A row of TOKENS came."""

    link: int
    epoch: int
    first: int
    ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()
    finish: FinishReason | None = None
    stop_id: int | None = None


@dataclass(frozen=True, slots=True)
class ClosedByNode:
    """CLOSED came."""

    link: int
    epoch: int
    reason: CloseReason
    code: ErrorCode | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class RefusedByNode:
    """REFUSE came for our OPEN."""

    link: int
    epoch: int
    code: ErrorCode
    text: str = ""
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The link that carries the placement is gone, or the node is judged dead."""

    link: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class Stalled:
    """The node works, but not on this session."""

    link: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Relieved:
    """The shell moves this placement away from a node that drains; `target` has prefilled its context, if one has."""

    link: int
    epoch: int
    target: str | None


@dataclass(frozen=True, slots=True)
class Relinked:
    """The shell replaces the link of this placement: the session goes on at the same node, over the link `fresh`."""

    link: int
    epoch: int
    fresh: int


@dataclass(frozen=True, slots=True)
class BootVerdict:
    """After a cut: the node was dialled again and its process is the same, or is not."""

    boot: str
    is_lost: bool


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """The shell cannot place it: refused for good, or waited for too long."""

    code: ErrorCode
    text: str
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TooNarrow:
    """No window that is left holds another token of this session."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads any more."""


@dataclass(frozen=True, slots=True)
class StopAt:
    """The head matched a stop string: the output ends at `count` ids."""

    count: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


NodeInput = Acknowledged | Advanced | Arrived | ClosedByNode | RefusedByNode | Stalled
HeadInput = (
    Placed
    | NodeLost
    | Relieved
    | Relinked
    | BootVerdict
    | NotPlaced
    | TooNarrow
    | ClientGone
    | StopAt
    | Tick
)
Input = NodeInput | HeadInput

# --- what is to be done ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Find a node, or queue. Answered by Placed, NotPlaced or TooNarrow.

    `verdict` is set when a node said that waiting there is hopeless: it is the answer once no node beside those in `avoid` is
    left to ask. `target` is taken if it still can.
    """

    avoid: frozenset[str]
    is_move: bool
    reason: str
    verdict: NotPlaced | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class SendOpen:
    """Send OPEN for the placement just made, with the journal as it is now."""

    epoch: int
    max_output: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The placement of `epoch` is over: release what it holds; tell the node if `is_told`."""

    epoch: int
    is_told: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Blame:
    """The node did wrong: its circuit counts a fault."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Postpone:
    """The node is busy: do not ask it again before `retry_after_ms`."""

    node: str
    retry_after_ms: int | None


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand these ids to the reader; they are in the journal."""

    first: int
    ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Report:
    """Prefill progress, for the reader."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Announce:
    """A move, for the reader and the log."""

    moves: int
    reason: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Remember this request's hash: it killed nodes."""


@dataclass(frozen=True, slots=True)
class End:
    """The terminal action of a generation that ended well. Nothing follows."""

    reason: FinishReason
    stop_id: int | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """The terminal action of a generation that did not. Nothing follows."""

    code: ErrorCode
    text: str
    retry_after_ms: int | None = None


NodeAction = Place | SendOpen | Leave | Blame | Postpone
ReaderAction = Deliver | Report | Announce | Quarantine | End | Fail
Action = NodeAction | ReaderAction
