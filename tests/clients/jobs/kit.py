"""What every job of a client program shares: where the server is, and how it is told what worked. Standard library only."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable

URL = os.environ.get("CLIENT_URL", "")
MODEL = os.environ.get("CLIENT_MODEL", "")
KEY = os.environ.get("CLIENT_KEY", "")
STORY = "Tell a short story about a lighthouse."
WEATHER = "What is the weather in Paris?"
PERSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}},
    "required": ["city"],
    "additionalProperties": False,
}


def need(claim: object, words: object) -> None:
    if not claim:
        raise AssertionError(str(words))


def need_person(found: object) -> None:
    need(isinstance(found, dict) and set(found) == {"name", "age"}, found)


def report(**jobs: Callable[[], None]) -> None:
    """Do the jobs and tell the outcome of each on a line of its own."""
    for name, job in jobs.items():
        error = ""
        try:
            job()
        except Exception as failure:  # noqa: BLE001 - whatever a program raises is its outcome
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"[:300]
        print(json.dumps({"what": name, "error": error}), flush=True)
