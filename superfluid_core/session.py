"""The shared nouns of one generation.

A *session* is one choice of one request: prompt ids, sampling, class, tenant, absolute limits. These values
are built at the border (HTTP, wire), validated there, and are trusted everywhere below. Nobody changes a `SessionSpec`;
it is not frozen, for it has many fields and a frozen one costs several times as much to make.
Token ids are plain ints in tuples; lengths count tokens; limits are absolute (never "remaining").
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple


class QosClass(IntEnum):
    """Rank of a session; a lower number is served first (scheduler.md, QoS classes)."""

    INTERACTIVE = 0
    COMPLETION = 1
    AGENT = 2
    BACKGROUND = 3

    @property
    def label(self) -> str:
        return _LABELS[self]

    @staticmethod
    def parse(text: str) -> QosClass:
        """Map a name, alias or digit to its class, case-insensitively. Raises ValueError."""
        found = QOS_ALIASES.get(text.strip().lower())
        if found is None:
            known = ", ".join(qos.label for qos in QosClass)
            raise ValueError(f"unknown class {text[:40]!r}; known: {known}")
        return found


_LABELS = tuple(qos.name.lower() for qos in QosClass)

QOS_ALIASES: dict[str, QosClass] = {
    "interactive": QosClass.INTERACTIVE,
    "interactive-chat": QosClass.INTERACTIVE,
    "0": QosClass.INTERACTIVE,
    "completion": QosClass.COMPLETION,
    "inline-completion": QosClass.COMPLETION,
    "1": QosClass.COMPLETION,
    "agent": QosClass.AGENT,
    "foreground": QosClass.AGENT,
    "foreground-agent": QosClass.AGENT,
    "2": QosClass.AGENT,
    "background": QosClass.BACKGROUND,
    "background-agent": QosClass.BACKGROUND,
    "3": QosClass.BACKGROUND,
}


class FinishReason(StrEnum):
    """Why a session ended. STOP covers end-of-text and stop ids; stop strings end it at the head."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class Determinism(StrEnum):
    """What an engine promises about repeating a session's tokens (fleet.md P3)."""

    EXACT = "exact"
    BATCH_INVARIANT = "batch-invariant"
    NONE = "none"


class GrammarKind(StrEnum):
    """How `Grammar.text` is to be read."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class SessionKey(NamedTuple):
    """Names a session on a node: ids are minted by heads, so the head is part of the key."""

    head: str
    session: int


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output, composed and validated by the head, compiled by the node."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next id is drawn. The order of application is engine.md's, section Sampling.

    `seed` is a u64: noise is a counter-based draw keyed (seed, choice, output index), so a session
    can be resumed anywhere. `temperature` below 1e-5 is greedy; `top_k` 0 is off; `logprobs` None is
    off, N asks for the N best beside the sampled id.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclass(slots=True, unsafe_hash=True)
class SessionSpec:
    """Everything a node needs to run one choice, from the start or from any delivered token on.

    `prompt` and `delivered` are token ids; the context is their concatenation. `max_output` and
    `min_output` are absolute counts that include `delivered`. `stop_ids` is the complete set of ids that end
    the session (the model's end-of-text ids included unless the request ignores them); they are masked out
    of the draw while fewer than `min_output` tokens exist. At `deadline_ns` it ends wherever it is; at `start_deadline_ns` it ends
    if it never had a lane until then.
    """

    key: SessionKey
    model: str
    prompt: tuple[int, ...]
    max_output: int
    delivered: tuple[int, ...] = ()
    min_output: int = 0
    stop_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = SamplingParams()
    choice: int = 0
    qos: QosClass = QosClass.AGENT
    tenant: str = "anonymous"
    batch_invariant: bool = False
    cache_salt: bytes = b""
    grammar: Grammar | None = None
    deadline_ns: int | None = None
    prompt_logprobs: int | None = None
    start_deadline_ns: int | None = None
    weight: int = 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the sampled id and of the best ids, before temperature; nats."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
