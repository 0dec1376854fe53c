"""What the texts say against what the programs know: flags, commands, metrics, routes, scenarios, settings, error codes.

Both ways where a text claims to be whole: docs/scheduling.md lists every setting of the scheduler, docs/http.md every route of a
head, docs/metrics.md every metric, docs/simulator.md every scenario.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import click
import pytest
from prometheus_client import CollectorRegistry

from superfluid_core.errors import ErrorCode
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.scheduler import Scheduler
from superfluid_core.simulator.costs import parse_cost
from superfluid_core.simulator.flags import FLAG_TABLE, Flags, parse_setting, set_flags
from superfluid_core.simulator.scenarios import SCENARIOS
from superfluid_head.api.state import Head
from superfluid_head.app import routes
from superfluid_head.cli import command as head_command
from superfluid_head.demo import main as demo_command
from superfluid_head.metrics import HeadMetrics
from superfluid_noded.cli import command as node_command
from superfluid_noded.config import OPTIONS as NODE_OPTIONS
from superfluid_noded.metrics import NodeMetrics
from superfluid_noded.scheduling import SCHEDULING_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md",
         *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]  # fmt: skip
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")
METRIC = re.compile(r"\bsuperfluid_[a-z0-9_]+\b(?![./])")
PACKAGES = {"superfluid_core", "superfluid_head", "superfluid_noded"}
# flags of pip, systemd, docker and the tests' own programs in the texts' command lines, and an example of a name
FOREIGN = {"index-url", "now", "create", "build", "help", "some-name", "from-file", "only", "folder", "retry", "retry-connrefused",
           "retry-delay"}  # fmt: skip
LINK = re.compile(r"\]\(([^)\s]+)\)")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> Iterator[str]:
    """Lines of code: indented by four, continuation lines joined."""
    whole = text.replace("\\\n", " ")
    for line in whole.splitlines():
        if line.startswith("    "):
            yield line.strip()


def command_lines(text: str) -> Iterator[list[str]]:
    """Every mention of one of the programs as a command line, in blocks and in code spans, comments cut off."""
    spans = re.findall(r"`([^`\n]+)`", text)
    for line in (*blocks(text), *spans):
        bare = re.sub(r"\s#.*$", "", line)
        if re.match(r"(/opt/superfluid/bin/)?superfluid(-noded)?( |$)", bare):
            yield shlex.split(bare)


def options_of(command: click.Command) -> set[str]:
    return {
        name.removeprefix("--")
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
    } | {"help"}


def every_command(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from every_command(found)


@functools.cache
def known_flags() -> frozenset[str]:
    commands = [*every_command(head_command), node_command, demo_command]
    return frozenset(name for each in commands for name in options_of(each))


def resolve(words: list[str]) -> tuple[click.Command | None, list[str]]:
    """Find the command that a line means, and what is left of the line. None: there is no such command."""
    program, *rest = words
    if program.endswith("superfluid-noded"):
        return node_command, rest
    command: click.Command = head_command
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            return None, rest
        command, rest = found, rest[1:]
    return command, rest


@pytest.mark.parametrize("name", TEXTS)
def test_every_flag_in_a_text_is_one_of_a_program(name: str) -> None:
    flags = set(FLAG.findall(read(name))) - FOREIGN
    assert not sorted(flags - known_flags())


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_line_in_a_text_is_one_that_a_program_takes(name: str) -> None:
    wrong = []
    for words in command_lines(read(name)):
        command, rest = resolve(words)
        given = {word.partition("=")[0][2:] for word in rest if word.startswith("--")}
        if command is None or given - options_of(command):
            wrong.append(" ".join(words))
    assert not wrong


@functools.cache
def metric_names() -> frozenset[str]:
    scheduler = Scheduler(SchedulerLimits(), PoolShape(16, 8, 128))
    node = NodeMetrics(scheduler.stats, {"model": "m"})
    registries: tuple[CollectorRegistry, ...] = (node.registry, HeadMetrics().registry)
    families = [family for registry in registries for family in registry.collect()]
    return frozenset(
        family.name + ("_total" if family.type == "counter" else "") for family in families
    )


@pytest.mark.parametrize("name", TEXTS)
def test_every_metric_in_a_text_is_in_a_registry(name: str) -> None:
    named = set(METRIC.findall(read(name))) - PACKAGES
    assert not sorted(named - metric_names())


def test_every_metric_stands_in_the_reference() -> None:
    assert not sorted(metric_names() - set(METRIC.findall(read("docs/metrics.md"))))


def test_every_setting_of_the_scheduler_stands_in_its_text() -> None:
    named = set(FLAG.findall(read("docs/scheduling.md")))
    assert not sorted({option.name for option in SCHEDULING_OPTIONS} - named)
    assert {option.name for option in SCHEDULING_OPTIONS} < {option.name for option in NODE_OPTIONS}


def test_the_text_on_http_has_exactly_the_routes_of_a_head() -> None:
    head = cast("Head", Mock())
    there = {
        f"{verb} {path.replace(':path', '')}"
        for verbs, path, _ in routes(head)
        for verb in verbs
        if verb != "HEAD"
    }
    named = set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", read("docs/http.md")))
    assert named == there
    others = {
        found
        for name in TEXTS
        for found in re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", read(name))
    }
    assert not sorted(others - there)


def test_the_text_on_http_names_error_codes_that_exist() -> None:
    table = read("docs/http.md").partition("## Errors")[2].partition("## ")[0]
    rows = [line for line in table.splitlines() if re.match(r"\| \d", line)]
    named = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    source = "".join(p.read_text("utf-8") for p in (ROOT / "superfluid_head").rglob("*.py"))
    unknown = named - {code.value for code in ErrorCode}
    assert not sorted(code for code in unknown if f'code="{code}"' not in source)
    assert len(named) > 20


def test_the_text_on_the_simulator_has_exactly_its_scenarios() -> None:
    table = read("docs/simulator.md").partition("## Scenarios")[2].partition("## ")[0]
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.M) == list(SCENARIOS)


@pytest.mark.parametrize("name", TEXTS)
def test_what_texts_have_the_simulator_do_it_can_do(name: str) -> None:
    for words in command_lines(read(name)):
        if words[1:2] != ["simulate"] or len(words) < 4:
            continue
        if words[2] in ("run", "sweep"):
            assert words[3] in SCENARIOS
        settings = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
        settings += [words[n + 1] for n, word in enumerate(words) if word == "--over"]
        pairs = [parse_setting(each) for each in settings]
        values = [(key, each) for key, text in pairs for each in text.split(",")]
        set_flags(Flags(), [pair for pair in values if pair[0] != "cost"])


def test_settings_and_costs_that_the_text_on_the_simulator_names_exist() -> None:
    text = read("docs/simulator.md")
    flags = text.partition("## Flags")[2].partition("## ")[0]
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)*)[`=]", flags))
    assert named <= set(FLAG_TABLE)
    costs = text.partition("## What a step costs")[2].partition("## ")[0]
    for cost in re.findall(r"^\| `([^`]+)` \|", costs, re.M)[1:]:
        if "FILE" not in cost:
            parse_cost(cost, 1_000_000)


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_of_a_text_leads_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    broken = []
    for link in LINK.findall(read(name)):
        path, _, anchor = link.partition("#")
        target = folder / path if path else ROOT / name
        if "://" not in link and not (
            target.exists() and (not anchor or anchor in anchors(target.read_text("utf-8")))
        ):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        ("superfluid serve demo --class-lanes agent=2", True),
        ("superfluid srve demo", False),
        ("superfluid simulate walk", False),
        ("superfluid serve demo --watermarks 2", False),
        ("superfluid-noded --fleet x", False),
    ],
)
def test_a_wrong_line_would_be_found(line: str, is_right: bool) -> None:
    (words,) = command_lines(f"    {line}\n")
    command, rest = resolve(words)
    given = {word[2:] for word in rest if word.startswith("--")}
    assert (command is not None and given <= options_of(command)) == is_right
