"""The ready file: written once, when everything listens, for whoever started the program."""

from __future__ import annotations

import json
import os
from pathlib import Path

from superfluid_core.errors import ConfigError


def write_ready(path: Path, places: list[tuple[str, int]], joining: list[tuple[str, int]]) -> None:
    """Write atomically: whoever sees the file sees all of it."""
    facts = {"pid": os.getpid(), "http": places, "fleet": joining}
    body = json.dumps(facts)
    draft = path.with_name(path.name + ".new")
    try:
        draft.write_text(body, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the ready file {path}: {error.strerror}") from None
