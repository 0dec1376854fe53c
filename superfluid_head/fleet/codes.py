"""Which of a node's verdicts mean what for a session: come back, move on, or give up. Pure tables."""

from __future__ import annotations

from superfluid_core.errors import ErrorCode

BUSY_CODES = frozenset(
    {
        ErrorCode.QUEUE_FULL,
        ErrorCode.SLO_UNATTAINABLE,
        ErrorCode.RATE_LIMIT_EXCEEDED,
        ErrorCode.SESSION_LIMIT,
        ErrorCode.MODEL_LOADING,
        ErrorCode.DRAINING,
        ErrorCode.OVERLOADED,
    }
)
# One lane's trouble may be the request's own doing: it moves, the node is not blamed.
LANE_CODES = frozenset({ErrorCode.LANE_FAULT, ErrorCode.NAN_LOGITS, *BUSY_CODES})
FINAL_CODES = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ErrorCode.UNSUPPORTED,
        ErrorCode.INVALID_GRAMMAR,
        ErrorCode.TEMPLATE_ERROR,
        ErrorCode.GRAMMAR_REPLAY,
        ErrorCode.REQUEST_QUARANTINED,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.TIMEOUT,
    }
)
