"""Every command line of README.md and docs/: found, split as a shell does, and held against click's own parsers.

A line stands in a block (indented or fenced as `sh`), where it has to be whole, or in a code span, where it may be the mention of a command: a
value or an argument may be missing at its end. Other fences are output. What a text writes in capitals stands for something of the reader's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from superfluid_core.errors import ConfigError
from superfluid_core.options import merge
from superfluid_head.cli import command as head_command
from superfluid_head.config import OPTIONS as HEAD_OPTIONS
from superfluid_noded.cli import command as node_command
from superfluid_noded.config import OPTIONS as NODE_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
OURS = {"superfluid": head_command, "superfluid-noded": node_command}
TRIED = {"curl", "make", "python", "python3"}
FOREIGN = {
    "pip", "install", "systemd-sysusers", "systemd-tmpfiles", "systemctl", "openssl", "sudo", "chmod", "docker", "kubectl", "cd", "mkdir",
    "export", "kill", "wait", "sleep", "cat", "noded-env", "printf", "echo", "test", "grep", "set", "true",
}  # fmt: skip
"""Programs of others, builtins of the shell, and `deploy/noded-env`, which tests/deploy runs."""
ENDS = {"&", "&&", "|", "||", ";"}
REDIRECTIONS = {">", ">>", "<"}
STAND_INS = {"N": "2", "PCT": "50"}
"""Capitals where a number has to stand."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_PLACE = re.compile(r"<[a-z ]+>")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Line:
    """One command of a text. `words` begins with the program, without folders in front of its name."""

    text: str
    words: tuple[str, ...]
    is_whole: bool

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.text}: {shlex.join(self.words)}"


def lines_of(name: str, content: str | None = None) -> list[Line]:
    """Return the commands of a text, in its order but blocks first."""
    whole = content if content is not None else (ROOT / name).read_text(encoding="utf-8")
    whole = whole.replace("\\\n", " ")
    blocks = [block for kind, block in _FENCE.findall(whole) if kind == "sh"]
    bare = _FENCE.sub("", whole)
    indented = [line for line in bare.splitlines() if line.startswith("    ")]
    found = [
        Line(name, words, is_whole=True)
        for row in (*"\n".join(blocks).splitlines(), *indented)
        for words in _commands(row)
    ]
    running = "\n".join(line for line in bare.splitlines() if not line.startswith("    "))
    found += [
        Line(name, words, is_whole=False)
        for span in _SPAN.findall(running)
        for words in _commands(" ".join(span.split()))
        if words[0] in OURS or (words[0] in TRIED and len(words) > 1)
    ]
    return found


def every_line() -> list[Line]:
    return [line for name in TEXTS for line in lines_of(name)]


def _commands(row: str) -> Iterator[tuple[str, ...]]:
    """Split a row into commands; a row whose first word is no program that is known here is none."""
    try:
        scanner = shlex.shlex(
            _PLACE.sub("ADDRESS", row.strip()), posix=True, punctuation_chars=";&|<>"
        )
        scanner.whitespace_split = True
        tokens = list(scanner)
    except ValueError:
        return
    current: list[str] = []
    for token in [*tokens, ";"]:
        if token in ENDS:
            words = _bare(current)
            if words and words[0] in OURS.keys() | TRIED | FOREIGN:
                yield words
            current = []
        else:
            current.append(token)


def _bare(tokens: list[str]) -> tuple[str, ...]:
    """Leave out settings of the environment in front, and where output goes."""
    while tokens and _ASSIGNMENT.match(tokens[0]):
        tokens = tokens[1:]
    words: list[str] = []
    is_target = False
    for token in tokens:
        if token in REDIRECTIONS:
            words = words[:-1] if words and words[-1] == "2" else words
            is_target = True
        elif is_target:
            is_target = False
        else:
            words.append(token)
    if words:
        words[0] = words[0].rpartition("/")[2]
    return tuple(words)


def find(words: tuple[str, ...]) -> tuple[click.Command, list[str]]:
    """Return the command that a line of ours means, and what is left of it. Raises click.UsageError for one that there is not."""
    program, *rest = words
    command: click.Command = OURS[program]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            raise click.UsageError(f"no such command: {rest[0]}")
        command, rest = found, rest[1:]
    return command, rest


def complaint(line: Line) -> str | None:
    """Say what is wrong with a line of ours, by click's own parser and by what judges the values of settings; None if nothing is."""
    try:
        command, rest = find(line.words)
        given = [STAND_INS.get(word, word) for word in rest if word != "..."]
        with command.make_context(command.name, given) as context:
            _judge_settings(line.program, command, dict(context.params))
    except click.exceptions.Exit:  # --help and --version were asked for
        return None
    except click.exceptions.NoArgsIsHelpError:
        return None
    except click.MissingParameter as error:
        return error.format_message() if line.is_whole else None
    except click.BadOptionUsage as error:
        is_cut = not line.is_whole and line.words[-1] == error.option_name
        return None if is_cut else error.format_message()
    except click.ClickException as error:
        return error.format_message()
    except ConfigError as error:
        return error.message
    return None


def _judge_settings(program: str, command: click.Command, values: dict[str, object]) -> None:
    """Parse the values of a program's own settings. Raises ConfigError."""
    values.pop("config_file", None)
    if program == "superfluid-noded":
        options = NODE_OPTIONS
    elif command.name in ("serve", "check"):
        options = HEAD_OPTIONS
    else:
        return
    known = {option.attribute for option in options}
    merge(options, {name: value for name, value in values.items() if name in known}, {}, {})
