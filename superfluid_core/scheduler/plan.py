"""The scheduler's vocabulary: what comes in, what goes out, and the plan that an engine runs.

Nothing here decides. Inputs and effects are immediate; a `TickPlan` is run by an engine which answers with one
`StepDone` per forward pass and one `TickDone`. The engine never touches a block that the plan does not name.

    context   = prompt + every output id so far (delivered by another node, or emitted here)
    computed  = number of leading context positions whose KV is in the lane's blocks

A lane that prefills has `computed` < len(context) - 1; a lane that decodes has `computed` == len(context) - 1: its last
sampled id is the one input that is still to be fed.

Nobody changes any of these values once it is made. Those that come with every session, step or tick are not frozen for all
that: a frozen one costs four times as much to make.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import overload

from superfluid_core.errors import ErrorCode
from superfluid_core.session import (
    FinishReason,
    QosClass,
    SessionKey,
    SessionSpec,
    TokenLogprobs,
)

# --- inputs ---------------------------------------------------------------------------------------


@dataclass(slots=True, unsafe_hash=True)
class Submit:
    """A new session asks for a lane. Answered by Accepted or Reject, at once."""

    spec: SessionSpec


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a session now; its Finish carries `reason`. Unknown keys are ignored."""

    key: SessionKey
    reason: FinishReason = FinishReason.CANCELLED


@dataclass(frozen=True, slots=True)
class SetQos:
    """Change the class of a session (S8)."""

    key: SessionKey
    qos: QosClass


@dataclass(frozen=True, slots=True)
class LaneFault:
    """One lane cannot go on (bad grammar, NaN logits, ...); only that lane ends."""

    lane: int
    code: ErrorCode
    text: str


@dataclass(slots=True)
class StepDone:
    """One forward pass is done. Parallel columns: `ids[i]` was sampled in `lanes[i]`. Nobody changes it.

    `prefilled` holds (lane, prompt tokens computed in this step). `logprobs` is parallel to `lanes` or None when no
    lane asked. `tokens` is the number of rows of the step; `elapsed_ns` its duration.
    """

    tick: int
    step: int
    lanes: Sequence[int]
    ids: Sequence[int]
    prefilled: Sequence[tuple[int, int]]
    tokens: int
    elapsed_ns: int
    logprobs: Sequence[TokenLogprobs | None] | None = None
    faults: Sequence[LaneFault] = ()


class TickOutcome(StrEnum):
    """How a tick ended: as planned, cut short by `Interrupt`, or refused before its first step."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    REFUSED = "refused"


@dataclass(slots=True, unsafe_hash=True)
class TickDone:
    """The plan is no longer in flight. What was not reported by a StepDone did not happen.

    The plan's moves and copies of KV did happen, with or without a step, unless it was refused. `is_followed`: the engine went on
    with the plan that was foreseen behind this one, so that is in flight now.
    """

    tick: int
    outcome: TickOutcome
    steps: int
    elapsed_ns: int
    is_followed: bool = False


class PressureLevel(StrEnum):
    """The operating system's word on memory (Linux PSI)."""

    NONE = "none"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Pressure:
    """Memory pressure of the host changed."""

    level: PressureLevel


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new sessions from now on; those that are here run on. `is_over`: take new ones again."""

    is_over: bool = False


Input = Submit | Cancel | SetQos | StepDone | TickDone | Pressure | Drain

# --- effects --------------------------------------------------------------------------------------


@dataclass(slots=True, unsafe_hash=True)
class Accepted:
    """The session is queued; `position` sessions of its class or better stand before it."""

    key: SessionKey
    position: int
    cached_tokens: int


@dataclass(slots=True, unsafe_hash=True)
class Progress:
    """Context tokens computed so far, of `total`; `cached` of them came from the prefix cache."""

    key: SessionKey
    done: int
    total: int
    cached: int


@dataclass(slots=True)
class Emit:
    """One output id, a row of `Emits`. Nobody changes it. `index` counts from the session's first output, delivered ones included."""

    key: SessionKey
    index: int
    token: int
    logprobs: TokenLogprobs | None


class Indices(Sequence[int]):
    """Numbers that all grow by one a step: `bases[i] + shift`. Worked out when somebody reads them."""

    __slots__ = ("_bases", "_shift")

    def __init__(self, bases: Sequence[int], shift: int) -> None:
        self._bases = bases
        self._shift = shift

    def __len__(self) -> int:
        return len(self._bases)

    def __iter__(self) -> Iterator[int]:
        shift = self._shift
        return iter([base + shift for base in self._bases])

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index - self._shift in self._bases

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        return list(self)[place]


@dataclass(slots=True)
class Emits:
    """All output ids of one forward pass, at most one a session, as parallel columns; iterating gives rows.

    Columns, for an object per lane and step is most of what a step would cost. Nobody changes them: the next step's may
    share them. `logprobs` is None when no lane asked.
    """

    keys: Sequence[SessionKey]
    indices: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] | None = None

    def __iter__(self) -> Iterator[Emit]:
        logprobs = self.logprobs or (None,) * len(self.keys)
        return map(Emit, self.keys, self.indices, self.ids, logprobs)


@dataclass(slots=True, unsafe_hash=True)
class Finish:
    """The one terminal event of an accepted session. `stop_id` is the id that ended it, if one did."""

    key: SessionKey
    reason: FinishReason
    stop_id: int | None = None
    code: ErrorCode | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """The one answer to a session that was not accepted."""

    key: SessionKey
    code: ErrorCode
    text: str
    retryable: bool
    retry_after_ms: int | None = None


@dataclass(slots=True, unsafe_hash=True)
class Interrupt:
    """Ask the engine to stop the tick in flight at its next step."""

    tick: int


Effect = Accepted | Progress | Emits | Finish | Reject | Interrupt

# --- the plan -------------------------------------------------------------------------------------


@dataclass(slots=True, unsafe_hash=True)
class LaneStart:
    """A session takes a lane: the engine builds its sampling row from this, once.

    `outputs` are all output ids so far (delivered and emitted): penalties, grammar and counters resume from them.
    """

    lane: int
    spec: SessionSpec
    outputs: tuple[int, ...]


@dataclass(slots=True)
class LanePlan:
    """What one lane does in this tick.

    `inputs` are the ids to feed at positions `computed .. computed+len(inputs)-1`. `grant` is how many ids to sample
    after them: 0 when the context is not complete with this tick's inputs. `decoding` lanes have exactly one input
    and come first in every step. `output_index` is the index of the first id to be sampled. `blocks` maps positions
    to KV blocks (position p lives in blocks[p // block_tokens]) and covers every position that the tick writes.
    """

    lane: int
    decoding: bool
    computed: int
    inputs: tuple[int, ...]
    grant: int
    output_index: int
    blocks: tuple[int, ...]


class LanePlans(Sequence[LanePlan]):
    """The lanes of a plan: decoding ones as parallel columns, then prompts. Nobody changes them.

    Columns, for most ticks carry the same decoding lanes and an object for each would be most of what a plan costs. `tokens`
    are their inputs, one each. The rows of a `LanePlan` each are made when somebody asks for them.
    """

    __slots__ = ("_rows", "computed", "grants", "indices", "lanes", "prompts", "tables", "tokens")

    def __init__(
        self,
        decoding: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
        tables: Sequence[tuple[int, ...]],
        prompts: Sequence[LanePlan],
    ) -> None:
        """Take the columns of `decoding` in this order: lanes, computed, tokens, grants, indices."""
        self.lanes, self.computed, self.tokens, self.grants, self.indices = decoding
        self.tables = tables
        self.prompts = prompts
        self._rows: tuple[LanePlan, ...] | None = None

    @staticmethod
    def of(rows: Sequence[LanePlan]) -> LanePlans:
        """Split rows into those columns; a decoding lane without a grant has no part in them."""
        decoding = [each for each in rows if each.decoding and each.grant > 0]
        columns = (
            [each.lane for each in decoding],
            [each.computed for each in decoding],
            [each.inputs[0] for each in decoding],
            [each.grant for each in decoding],
            [each.output_index for each in decoding],
        )
        prompts = [each for each in rows if not each.decoding]
        return LanePlans(columns, [each.blocks for each in decoding], prompts)

    def __len__(self) -> int:
        return len(self.lanes) + len(self.prompts)

    def __iter__(self) -> Iterator[LanePlan]:
        return iter(self._all())

    @overload
    def __getitem__(self, place: int) -> LanePlan: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[LanePlan]: ...

    def __getitem__(self, place: int | slice) -> LanePlan | Sequence[LanePlan]:
        return self._all()[place]

    def _all(self) -> tuple[LanePlan, ...]:
        if self._rows is None:
            columns = (self.lanes, self.computed, self.tokens, self.grants, self.indices)
            rows = [
                LanePlan(lane, True, computed, (token,), grant, index, table)
                for lane, computed, token, grant, index, table in zip(
                    *columns, self.tables, strict=True
                )
            ]
            self._rows = (*rows, *self.prompts)
        return self._rows


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one whole KV block inside the pool (copy-on-write)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Park:
    """Move KV between the pool and the host store under `ticket`, block by block.

    Out keeps a copy of `blocks` in this order; in puts the first len(blocks) of it into `blocks`, and uses the ticket up.
    """

    ticket: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class TickPlan:
    """One engine call. Order: park_drop, park_out, park_in, copies, then `frees`, `starts`, then the steps.

    Drops come first, so that the host never holds more than was planned. A plan without lanes has moves only.
    """

    tick: int
    lanes: Sequence[LanePlan]
    step_tokens: int
    starts: tuple[LaneStart, ...] = ()
    frees: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    park_out: tuple[Park, ...] = ()
    park_in: tuple[Park, ...] = ()
    park_drop: tuple[int, ...] = ()
    batch_invariant: bool = False
