"""What can go wrong, in one vocabulary that crosses the wire.

An `ErrorCode` is the contract: nodes send codes, heads map them to HTTP statuses in one file
(`superfluid_head/api/errors.py`), clients branch on them. Class names never leave the process.
This module knows nothing of HTTP, sockets or torch.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Every code that a node, a head or a client may see."""

    # the request itself is wrong: a retry cannot help
    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNSUPPORTED = "unsupported_value"
    INVALID_GRAMMAR = "invalid_schema"
    MODEL_NOT_FOUND = "model_not_found"
    TEMPLATE_ERROR = "template_error"
    # capacity: a retry may help
    QUEUE_FULL = "queue_full"
    SLO_UNATTAINABLE = "slo_unattainable"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    CONCURRENCY_LIMIT_EXCEEDED = "concurrency_limit_exceeded"
    SESSION_LIMIT = "session_limit"
    NO_WORKER = "no_worker"
    MODEL_LOADING = "model_loading"
    DRAINING = "draining"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    # the generation was lost on the way
    NODE_LOST = "node_lost"
    FENCED = "fenced"
    LANE_FAULT = "lane_fault"
    NAN_LOGITS = "nan_logits"
    PREEMPT_FAILED = "preempt_failed"
    GRAMMAR_REPLAY = "grammar_replay"
    MOVES_EXHAUSTED = "moves_exhausted"
    REQUEST_QUARANTINED = "request_quarantined"
    # the link
    PROTOCOL_ERROR = "protocol_error"
    UNAUTHORIZED = "unauthorized"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    # start-up
    CONFIG = "config_error"
    MODEL_FILES = "model_files_error"
    # ours
    INTERNAL = "internal_error"


class SuperfluidError(Exception):
    """Root of every expected failure: a code, words for a person, and whether a retry may help."""

    code: ErrorCode = ErrorCode.INTERNAL
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        retryable: bool | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable
        self.retry_after_ms = retry_after_ms


class ConfigError(SuperfluidError):
    """Raised at start-up when flags, environment or files contradict or do not parse (exit 2)."""

    code = ErrorCode.CONFIG


class ModelFilesError(SuperfluidError):
    """Raised when a model cannot be found, read or understood (exit 3)."""

    code = ErrorCode.MODEL_FILES


class InvalidRequestError(SuperfluidError):
    """Raised when a request can never succeed as it stands; `param` names the member at fault."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(
        self, message: str, *, param: str | None = None, code: ErrorCode | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.param = param


class CapacityError(SuperfluidError):
    """Raised when the fleet cannot take the request now; retryable, with a hint when known."""

    code = ErrorCode.OVERLOADED
    retryable = True


class GenerationError(SuperfluidError):
    """Raised when an accepted generation cannot be completed anywhere."""

    code = ErrorCode.NODE_LOST
    retryable = True


class LocalProtocolError(SuperfluidError):
    """Raised when *our* side asks the protocol machine for an illegal transition: a bug here."""

    code = ErrorCode.INTERNAL


class RemoteProtocolError(SuperfluidError):
    """Raised when the peer broke the link protocol; the link closes and counts a fault."""

    code = ErrorCode.PROTOCOL_ERROR


class EngineError(SuperfluidError):
    """Raised when the engine cannot go on: the process ends and its supervisor restarts it."""

    code = ErrorCode.INTERNAL
