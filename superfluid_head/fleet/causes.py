"""Why a session is placed or moved, as one of a few words: for counters, whose labels must not grow, and for traces. Pure.

What the log and `why` say is the whole reason (`generation.py`, `transitions.Loss`); it may name codes and figures.
"""

from __future__ import annotations

from superfluid_head.fleet.transitions import Loss

NEW = "new"
FAULT = "bad-tokens"
_WORDS = {
    NEW: NEW,
    Loss.CUT.value: "link-cut",
    Loss.SILENT.value: "node-silent",
    Loss.HUNG.value: "engine-hung",
    Loss.GOING.value: "drain",
    Loss.LINK.value: "link-lost",
    "node draining": "drain",
    "session stalled": "stalled",
}
_BEGINNINGS = {"refused": "refused", "closed by the node": "closed"}
CAUSES = (*dict.fromkeys((*_WORDS.values(), *_BEGINNINGS.values(), FAULT)),)


def cause_of(reason: str) -> str:
    """Return the word for a reason. What is none of those known is a fault in what the node said."""
    word = _WORDS.get(reason)
    if word is not None:
        return word
    return _BEGINNINGS.get(reason.partition(":")[0], FAULT)
