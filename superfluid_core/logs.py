r"""One way to log: a message for a person and named fields, as text or as JSON lines on stderr.

Logs carry ids, counts, timings and codes, never prompts or answers. Whatever a peer or client can influence is made harmless
here: control characters become `\xNN`, values are cut. Shells log; pure code returns effects. Programs call
`setup_logging` once; libraries that log through the standard module pass through the same formatter.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from superfluid_core.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

VALUE_CHARS_MAX = 200
MESSAGE_CHARS_MAX = 1_000
TRACE_CHARS_MAX = 8_000
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
FORMATS = ("text", "json")

_FIELDS = "superfluid_fields"
_logger = logging.getLogger(__name__)


def _is_dangerous(code: int) -> bool:
    """C0, DEL and C1 controls, line and paragraph separators, direction overrides, lone surrogates."""
    return (
        code < 0x20
        or 0x7F <= code <= 0x9F
        or code in (0x2028, 0x2029, 0xFEFF)
        or 0x200E <= code <= 0x200F
        or 0x202A <= code <= 0x202E
        or 0x2066 <= code <= 0x2069
        or 0xD800 <= code <= 0xDFFF
    )


def clean(text: str, chars_max: int = VALUE_CHARS_MAX) -> str:
    """`text` cut to `chars_max` and with every character that could drive a terminal spelled out."""
    cut = text[:chars_max] + "..." if len(text) > chars_max else text
    if cut.isascii() and cut.isprintable():
        return cut
    return "".join(_spelled(char) if _is_dangerous(ord(char)) else char for char in cut)


def _spelled(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _plain(value: Any) -> Any:
    """Return a field's value as JSON knows it: numbers and booleans stay, the rest becomes clean text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return clean(str(value))


def _shown(value: Any) -> str:
    """Show a field's value in a text line; quoted when a reader could not tell where it ends."""
    plain = _plain(value)
    if not isinstance(plain, str):
        return str(plain)
    if plain == "" or any(char in plain for char in ' "='):
        return '"' + plain.replace('"', "'") + '"'
    return plain


def _stamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def _trace(record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[1] is None:  # asyncio passes False
        return []
    text = "".join(traceback.format_exception(record.exc_info[1]))[-TRACE_CHARS_MAX:]
    return [clean(line, MESSAGE_CHARS_MAX) for line in text.rstrip().split("\n")]


class TextFormatter(logging.Formatter):
    """`2026-11-29T12:00:00.000Z INFO program: message key=value` and an indented traceback, if any."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, {})
        tail = "".join(f" {name}={_shown(value)}" for name, value in fields.items())
        message = clean(record.getMessage(), MESSAGE_CHARS_MAX)
        lines = [f"{_stamp(record)} {record.levelname} {self._program}: {message}{tail}"]
        lines += [f"    | {line}" for line in _trace(record)]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, program, logger, message and the fields beside them."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "program": self._program,
            "logger": record.name,
            "message": clean(record.getMessage(), MESSAGE_CHARS_MAX),
        }
        for name, value in getattr(record, _FIELDS, {}).items():
            entry[f"{name}_" if name in entry else name] = _plain(value)
        trace = _trace(record)
        if trace:
            entry["traceback"] = trace
        return json.dumps(entry, allow_nan=True, ensure_ascii=True)


def setup_logging(fmt: str, level: str, program: str, stream: TextIO | None = None) -> None:
    """Route everything to one handler on `stream` (stderr). Raises ConfigError for an unknown format or level."""
    if fmt not in FORMATS:
        raise ConfigError(f"log format {clean(fmt)!r} is none of {', '.join(FORMATS)}")
    if level not in LEVELS:
        raise ConfigError(f"log level {clean(level)!r} is none of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(program) if fmt == "json" else TextFormatter(program))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
    for name in ("asyncio", "httpx", "httpcore", "urllib3", "huggingface_hub", "uvicorn"):
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING))


def log(logger: logging.Logger, level: int | str, message: str, /, **fields: Any) -> None:
    """Log `message` with structured fields. `level` is a number of `logging` or a name of `LEVELS`."""
    number = LEVELS[level] if isinstance(level, str) else level
    if logger.isEnabledFor(number):
        logger.log(number, "%s", message, extra={_FIELDS: fields})


class LoopErrors:
    """What an event loop does with errors that nobody caught: log them, but running out of descriptors once a second.

    A loop that cannot accept reports it once for every place in its backlog; a thousand tracebacks a second would stop
    everything else that the process does.
    """

    def __init__(self) -> None:
        self._told_s: float | None = None
        self._more = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "out of system resource" not in context.get("message", ""):
            loop.default_exception_handler(context)
            return
        now_s = loop.time()
        if self._told_s is not None and now_s - self._told_s < 1.0:
            self._more += 1
            return
        cause = context.get("exception")
        log(_logger, "warning", "cannot accept connections", cause=cause, more=self._more)
        self._told_s, self._more = now_s, 0
