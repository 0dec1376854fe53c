"""`superfluid fleet`: the fleet's key, and what a running head is asked or told about its nodes.

A client of the admin routes like any other. Exit status: 0 done, 1 the head refused, could not be reached, or (`status`) cannot
serve a model; the table is printed before that is said. Names in tables are the nodes' own words, so they are made harmless.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from superfluid_core.errors import ConfigError, ErrorCode, SuperfluidError
from superfluid_core.logs import clean
from superfluid_head.commands.endpoint import ask, endpoint_flags
from superfluid_head.commands.groups import SuggestingGroup

DEFAULT_KEY_FILE = "fleet.key"
GRACE_MS_MAX = 86_400_000
CELL_CHARS_MAX = 60
NAMES_SHOWN_MAX = 16
COLUMNS = (
    "NODE", "STATE", "LANES", "QUEUED", "SESSIONS", "BLOCKS", "CIRCUIT", "LINK", "KEY", "AGE",
    "REKEYS", "ADDRESS", "MODELS",
)  # fmt: skip


@click.group("fleet", cls=SuggestingGroup)
def fleet() -> None:
    """Manage the fleet."""


@fleet.command("key")
@click.argument("path", default=DEFAULT_KEY_FILE)
def key(path: str) -> None:
    """Make a fleet key file at PATH [default: fleet.key] and print its id.

    Copy the file to every node (--auth-file) and head (--fleet-auth). An existing file is never overwritten.
    """
    from superfluid_core.link.keys import write_key_file

    if Path(path).is_dir():
        raise ConfigError(f"{path} is a directory; name a file")
    keys = write_key_file(path)
    click.echo(f"wrote {path} (mode 0600), key id {keys.key_id}")


@fleet.command("status")
@endpoint_flags
@click.option("--json", "is_json", is_flag=True, help="Print the head's answer as it is.")
def status(url: str, api_key_file: str | None, *, is_json: bool) -> None:
    """Show the nodes of a head, how full they are and what they serve."""
    found = ask(url, api_key_file, "GET", "/v1/fleet").needed()
    if is_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print_status(found)
    if not found.get("ready"):
        raise SuperfluidError("no model can be served now", code=ErrorCode.NO_WORKER)


@fleet.command("why")
@endpoint_flags
@click.option("--json", "is_json", is_flag=True, help="Print the head's answer as it is.")
@click.argument("request")
def why(request: str, url: str, api_key_file: str | None, *, is_json: bool) -> None:
    """Show where REQUEST ran and the scores that were compared; REQUEST is its x-request-id."""
    reply = ask(url, api_key_file, "GET", f"/v1/fleet/requests/{_quoted(request)}")
    if reply.code == "request_not_found":
        raise SuperfluidError(
            f"this head remembers no placement of '{request[:128]}': it is too old, was never placed, "
            "or went through another head"
        )
    found = reply.needed()
    if is_json:
        click.echo(json.dumps(found, indent=2))
        return
    for each in found["placements"]:
        click.echo(
            f"choice {each['choice']}, epoch {each['epoch']}: {clean(str(each['node']))} "
            f"({clean(str(each['reason']))}, {each['policy']}, waited {each['waited_ms']} ms)"
        )
        for line in each["scores"]:
            click.echo(f"    {clean(str(line))}")


@fleet.command("drain")
@endpoint_flags
@click.option(
    "--grace-ms",
    type=click.IntRange(0, GRACE_MS_MAX),
    metavar="N",
    help="After this long, what still runs there moves.  [default: the head's]",
)
@click.argument("node")
def drain(node: str, url: str, api_key_file: str | None, grace_ms: int | None) -> None:
    """Give NODE no new sessions; what runs there finishes, or moves after the grace.

    The node is told, so other heads leave it too. `undrain` takes it back, and so does a restart of the node.
    """
    body = {} if grace_ms is None else {"grace_ms": grace_ms}
    _order(node, "drain", url, api_key_file, body)
    click.echo(f"{clean(node)} gets no new sessions; superfluid fleet undrain takes it back")


@fleet.command("undrain")
@endpoint_flags
@click.argument("node")
def undrain(node: str, url: str, api_key_file: str | None) -> None:
    """Use a drained NODE again."""
    _order(node, "undrain", url, api_key_file, None)
    click.echo(f"{clean(node)} is used again")


def _order(node: str, verb: str, url: str, key_file: str | None, body: Any) -> None:
    reply = ask(url, key_file, "POST", f"/v1/fleet/nodes/{_quoted(node)}/{verb}", body)
    if reply.code == "node_not_found":
        known = ask(url, key_file, "GET", "/v1/fleet").needed()["nodes"]
        names = ", ".join(str(each["name"]) for each in known[:NAMES_SHOWN_MAX]) or "none"
        raise SuperfluidError(f"no node is called '{node[:100]}'; there are: {names}")
    reply.needed()


def _quoted(name: str) -> str:
    """Escape a name for one part of a path. Raises ConfigError for what no path can hold."""
    if name in ("", ".", ".."):
        raise ConfigError(f"'{name}' is no name")
    return quote(name, safe="")


def _print_status(found: dict[str, Any]) -> None:
    rows = [_row(node) for node in found["nodes"]]
    for line in _table([COLUMNS, *rows]):
        click.echo(line)
    for node in found["nodes"]:
        if node["detail"]:
            click.echo(f"{clean(str(node['name']))}: {clean(str(node['detail']))}")
    counters = found["counters"]
    click.echo(
        f"{found['running']} running, {sum(found['waiting'])} waiting; "
        f"{counters['placements']} placements, {counters['moves']} moves, {counters['faults']} faults; "
        f"{counters['joins']} joins, {counters['rekeys']} rekeys, "
        f"{counters['link_refusals'] + counters['join_refusals']} links refused"
    )


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    cells = (
        node["name"],
        node["state"],
        f"{node['lanes_busy']}/{node['lanes']}",
        node["queued"],
        node["sessions"],
        f"{node['blocks_used']}/{node['blocks']}",
        node["circuit"],
        _link_word(node),
        node["key"],
        _age_word(node["link_age_s"]) if node["links"] else "-",
        node["rekeys"],
        node["address"],
        ",".join(map(str, node["models"])) or "-",
    )
    return tuple(clean(str(cell), CELL_CHARS_MAX) for cell in cells)


def _link_word(node: dict[str, Any]) -> str:
    """Say how the links came about, and how many there are when it is not one."""
    count = node["links"]
    return str(node["link"]) + ("" if count == 1 else f" x{count}")


def _age_word(seconds: int) -> str:
    """Write an age in its largest unit."""
    for name, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{name}"
    return f"{seconds}s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
