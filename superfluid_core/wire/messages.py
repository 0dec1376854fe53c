"""Every message of the link, minor 0, as values. No bytes here: `codec.py` knows the layout.

Each class names its sender. Unless said otherwise `session` is the head's random u64, `epoch` the placement's number
(raised by every move), times are integer milliseconds, stamps integer nanoseconds of the *node's* CLOCK_BOOTTIME.
Token ids are tuples of ints here and packed little-endian u32 on the wire. Ranges are checked by the codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from superfluid_core.errors import ErrorCode
from superfluid_core.session import (
    Determinism,
    FinishReason,
    Grammar,
    QosClass,
    SamplingParams,
    TokenLogprobs,
)
from superfluid_core.wire.notes import Note

MINOR = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """head -> node, the first frame. Names no model."""

    minor: int
    features: tuple[str, ...]
    head: str


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """One model that a node serves. `weights` and `text` are fingerprints (decisions 5).

    `engine` numbers the engines of a node: names with one number are one model and share its lanes and its cache.
    """

    name: str
    weights: str
    text: str
    dtype: str
    build: str
    vocabulary: int
    eos_ids: tuple[int, ...]
    window: int
    lanes: int
    block_tokens: int
    blocks: int
    engine: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """node -> head, the answer to Hello. `boot` is new per process; `salt` only under an own PKI."""

    minor: int
    features: tuple[str, ...]
    node: str
    boot: str
    models: tuple[ModelOffer, ...]
    stamp_ns: int
    determinism: Determinism
    sessions_max: int
    lease_ttl_max_ms: int
    idle_timeout_ms: int
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Refuse:
    """node -> head: the link, or (session != 0) one OPEN, is refused."""

    code: ErrorCode
    text: str
    retry_after_ms: int | None = None
    session: int = 0
    epoch: int = 0


@dataclass(slots=True)
class Open:
    """head -> node: run a session from `delivered` on. Limits are absolute counts of output ids. Nobody changes it: it is not frozen as a `SessionSpec` is not.

    `stop_ids` are the request's own; the node adds its end-of-text ids unless `ignore_eos`. The lease counts from
    `lease_stamp_ns`, a stamp that this node sent. `deadline_ms` is a duration from receipt, or None; so is `start_deadline_ms`,
    which only binds until the session has a lane. `weight` is the tenant's share under the fair order.
    """

    session: int
    epoch: int
    model: str
    prompt: tuple[int, ...]
    delivered: tuple[int, ...]
    max_output: int
    min_output: int
    sampling: SamplingParams
    choice: int
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    grammar: Grammar | None
    qos: QosClass
    tenant: str
    batch_invariant: bool
    cache_salt: bytes
    lease_stamp_ns: int
    lease_ttl_ms: int
    deadline_ms: int | None = None
    prompt_logprobs: int | None = None
    start_deadline_ms: int | None = None
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Opened:
    """node -> head: the session is accepted and queued at `position`."""

    session: int
    epoch: int
    cached: int
    position: int


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """node -> head: context tokens computed, of `total`; `cached` of them from the prefix cache."""

    session: int
    epoch: int
    done: int
    total: int
    cached: int


@dataclass(slots=True, unsafe_hash=True)
class TokenRow:
    """One session's part of a TOKENS frame; `first` is the output index of `ids[0]`.

    `finish` is set with the last ids of a session (STOP or LENGTH); `stop_id` is the id that ended it and is also the
    last of `ids`. `logprobs` is parallel to `ids` or empty.
    """

    session: int
    epoch: int
    first: int
    ids: tuple[int, ...]
    finish: FinishReason | None = None
    stop_id: int | None = None
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """node -> head: everything one engine step produced for the sessions of this link."""

    rows: tuple[TokenRow, ...]


class CloseReason(StrEnum):
    """Why a node ended a session."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FENCED = "fenced"
    DEADLINE = "deadline"
    PREEMPT_FAILED = "preempt-failed"
    DRAIN = "drain"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Closed:
    """node -> head: nothing more will come for this placement."""

    session: int
    epoch: int
    reason: CloseReason
    code: ErrorCode | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class CancelSession:
    """head -> node: stop this placement; `reason` is for the log."""

    session: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetClass:
    """head -> node: SET_QOS."""

    session: int
    epoch: int
    qos: QosClass


@dataclass(frozen=True, slots=True)
class Renew:
    """head -> node: extends the lease of every session of the link from a stamp of the node."""

    stamp_ns: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine's part of STATUS, in its words."""

    lanes_busy: int
    lanes: int
    queued: int
    queued_tokens: int
    blocks_used: int
    blocks_cached: int
    blocks: int
    prefill_rate: float
    decode_rates: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Status:
    """node -> head: load and liveness. Rates are tokens a second, 0.0 while unknown.

    `queued` counts sessions per class, best first. `decode_rates` holds (lanes, tokens a second over all lanes).
    `step_predicted_ms` is the expected duration of the step that runs now. A node with several engines gives sums, the first
    engine's pool and rates, and in `engines` the load of each, by its number.
    """

    stamp_ns: int
    steps: int
    lanes_busy: int
    lanes: int
    queued: tuple[int, int, int, int]
    queued_tokens: int
    blocks_used: int
    blocks_cached: int
    blocks: int
    prefill_rate: float
    decode_rates: tuple[tuple[int, float], ...]
    step_predicted_ms: int
    draining: bool
    engines: tuple[EngineLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefix:
    """node -> head: 16-byte block hashes that came and went; a snapshot replaces everything, in numbered pieces.

    Each engine's cache has reports and a sequence of its own.
    """

    sequence: int
    piece: int
    pieces: int
    snapshot: bool
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    engine: int = 0


@dataclass(frozen=True, slots=True)
class Pin:
    """head -> node: evict these blocks of the model's cache last, for `ttl_ms`."""

    hashes: tuple[bytes, ...]
    ttl_ms: int
    model: str


@dataclass(frozen=True, slots=True)
class Unpin:
    """head -> node: forget a pin."""

    hashes: tuple[bytes, ...]
    model: str


@dataclass(frozen=True, slots=True)
class FileAsk:
    """head -> node: send one of the model's small text files (allow-listed names)."""

    request: int
    model: str
    name: str


@dataclass(frozen=True, slots=True)
class FilePiece:
    """node -> head: piece `piece` of `pieces`; `digest` is the SHA-256 of the whole, hex; empty when there is none."""

    request: int
    piece: int
    pieces: int
    digest: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Embed:
    """head -> node: pool the hidden states of these ids."""

    session: int
    model: str
    pooling: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """node -> head: little-endian float32 values, in numbered pieces."""

    session: int
    piece: int
    pieces: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """node -> head: log-probabilities of prompt ids from position `first` on, in numbered pieces."""

    session: int
    epoch: int
    first: int
    rows: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StatsAsk:
    """head -> node: metrics and scheduler stats, please."""

    request: int


@dataclass(frozen=True, slots=True)
class Stats:
    """node -> head: UTF-8 JSON, in numbered pieces."""

    request: int
    piece: int
    pieces: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SessionsAsk:
    """head -> node: asks what runs and what waits."""

    request: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One session as its node sees it."""

    head: str
    session: int
    state: str
    qos: QosClass
    tenant: str
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Sessions:
    """node -> head: rows, in numbered pieces."""

    request: int
    piece: int
    pieces: int
    rows: tuple[SessionRow, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """both: asks for a Pong with the same nonce."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    """both: the answer; a node attaches its status."""

    nonce: int
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """head -> node: DRAIN; no new sessions of any head, the rest ends after `grace_ms`. None: take sessions again."""

    grace_ms: int | None


@dataclass(frozen=True, slots=True)
class Goaway:
    """both: this link will close; open nothing more on it."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkError:
    """both: ERROR; the link closes after it."""

    code: ErrorCode
    text: str


Message = (
    Hello
    | Welcome
    | Refuse
    | Open
    | Opened
    | ProgressReport
    | Tokens
    | Closed
    | CancelSession
    | SetClass
    | Renew
    | Status
    | Prefix
    | Pin
    | Unpin
    | FileAsk
    | FilePiece
    | Embed
    | Embedded
    | PromptLogprobs
    | StatsAsk
    | Stats
    | SessionsAsk
    | Sessions
    | Ping
    | Pong
    | DrainOrder
    | Goaway
    | LinkError
    | Note
)
