"""What a log line may hold, whoever chose the text."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.logs import LoopErrors, clean, log, setup_logging


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    "hostile", ["a\r\nb", "\x1b[2J", "\x9b31m", "a\u2028b", "\u202egnp", "\ud800", "\x00", "\x7f"]
)
def test_hostile_characters_never_reach_the_stream_raw(hostile: str) -> None:
    for fmt in ("text", "json"):
        stream = io.StringIO()
        setup_logging(fmt, "info", "prog", stream)
        log(logging.getLogger("t"), logging.INFO, f"m {hostile}", peer=hostile)
        written = stream.getvalue()
        assert written.count("\n") == 1
        assert written.endswith("\n")
        assert not any(
            char in written[:-1] for char in hostile if not char.isalnum() and char not in "["
        )


def test_a_value_is_cut_at_200_characters_and_a_message_at_1000() -> None:
    stream = io.StringIO()
    setup_logging("json", "info", "prog", stream)
    log(logging.getLogger("t"), "info", "m" * 5_000, value="v" * 10_000)
    entry = json.loads(stream.getvalue())
    assert entry["value"] == "v" * 200 + "..."
    assert entry["message"] == "m" * 1000 + "..."


def test_json_keeps_numbers_and_never_overwrites_its_own_members() -> None:
    stream = io.StringIO()
    setup_logging("json", "debug", "prog", stream)
    log(logging.getLogger("t"), "debug", "hello", count=3, ok=True, level="mine", ratio=0.5)
    entry = json.loads(stream.getvalue())
    assert entry["count"] == 3
    assert entry["ok"] is True
    assert entry["level"] == "debug"
    assert entry["level_"] == "mine"
    assert entry["program"] == "prog"


def test_text_quotes_values_that_hold_spaces_and_hides_lower_levels() -> None:
    stream = io.StringIO()
    setup_logging("text", "warning", "prog", stream)
    log(logging.getLogger("t"), logging.INFO, "hidden")
    log(logging.getLogger("t"), logging.WARNING, "shown", name="two words", n=1)
    line = stream.getvalue()
    assert "hidden" not in line
    assert 'WARNING prog: shown name="two words" n=1' in line


def test_a_traceback_is_indented_and_cleaned() -> None:
    stream = io.StringIO()
    setup_logging("text", "info", "prog", stream)
    try:
        raise ValueError("bad \x1b[31m red")
    except ValueError:
        logging.getLogger("t").exception("failed")
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("ERROR prog: failed")
    assert all(line.startswith("    | ") for line in lines[1:])
    assert "\x1b" not in stream.getvalue()


def test_messages_of_other_libraries_pass_through_the_same_formatter() -> None:
    stream = io.StringIO()
    setup_logging("text", "info", "prog", stream)
    logging.getLogger("somebody.else").warning("value %s", "a\nb")
    assert stream.getvalue().rstrip("\n").endswith("WARNING prog: value a\\x0ab")


def test_unknown_formats_and_levels_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="log format 'xml'"):
        setup_logging("xml", "info", "prog")
    with pytest.raises(ConfigError, match="log level 'loud'"):
        setup_logging("text", "loud", "prog")


def test_clean_leaves_ordinary_text_alone() -> None:
    assert clean("Grüße, 世界 😀") == "Grüße, 世界 😀"


def test_a_loop_without_descriptors_logs_once_a_second_and_without_tracebacks() -> None:
    """Found by chaos C13: a thousand tracebacks for each try to accept stopped streams for seconds."""
    stream = io.StringIO()
    setup_logging("text", "info", "test", stream)
    said = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(24, "Too many"),
    }

    async def flood() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        for _ in range(1_000):
            loop.call_exception_handler(said)
        loop.call_exception_handler({"message": "something else"})

    asyncio.run(flood())
    text = stream.getvalue()
    assert text.count("cannot accept connections") == 1, text
    assert "something else" in text
    assert len(text.splitlines()) < 5, text
