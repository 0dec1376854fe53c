"""Times as Ollama's clients read them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def time_text(wall_s: int) -> str:
    """Spell seconds since 1970."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat().replace("+00:00", "Z")
