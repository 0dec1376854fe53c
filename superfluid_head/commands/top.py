"""`superfluid top`: the fleet in a terminal, a row a node, again and again; a client of `GET /v1/fleet` like any other.

On a terminal it redraws itself until it is interrupted; elsewhere, and with --once, it prints plain lines and ends. Names are
the nodes' own words, so they are made harmless. A head that cannot be reached for a while is said and asked again; one that
refuses ends it with exit status 1.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_core.logs import clean
from superfluid_head.commands.endpoint import ask, endpoint_flags

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

CELL_CHARS_MAX = 40
BAR_CELLS = 8
HIGH_PCT = 90
STYLES = {"up": "green", "draining": "yellow", "suspect": "yellow", "down": "red", "hung": "red"}
COLUMNS = ("NODE", "STATE", "LANES", "", "QUEUE", "KV", "TOK/S", "PREFILL/S", "CIRCUIT", "MODELS")
LEFT = frozenset({"NODE", "STATE", "", "CIRCUIT", "MODELS"})


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node as it is shown. `is_full` is a KV pool that is almost full."""

    state: str
    cells: tuple[str, ...]
    is_full: bool


@click.command("top")
@endpoint_flags
@click.option("--once", "is_once", is_flag=True, help="Print once and end.")
@click.option("--json", "is_json", is_flag=True, help="Print the head's answer as it is, once.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.2, 3_600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to ask.",
)
def top(
    url: str, api_key_file: str | None, *, is_once: bool, is_json: bool, interval_s: float
) -> None:
    """Watch the nodes of a head: how full and how fast they are, what waits, how long tokens take.

    On a terminal until interrupted; off one it prints once.
    """

    def state() -> dict[str, Any]:
        found = ask(url, api_key_file, "GET", "/v1/fleet").needed()
        assert isinstance(found, dict), "an answer that was needed is an object"
        return found

    if is_json:
        click.echo(json.dumps(state(), indent=2))
    elif is_once or not sys.stdout.isatty():
        for line in plain_lines(state()):
            click.echo(line)
    else:
        _watch(state, interval_s)


def summary_lines(state: dict[str, Any]) -> tuple[str, str]:
    """Say in two lines how the fleet is."""
    nodes, vitals = state["nodes"], state["vitals"]
    is_up = sum(bool(node["is_up"]) for node in nodes)
    queues = zip(state["classes"], state["waiting"], strict=False)
    waiting = ", ".join(f"{count} {name}" for name, count in queues if count) or "0"
    ready = "serving" if state["ready"] else "NOT SERVING"
    first = (
        f"{ready}: {is_up} of {len(nodes)} nodes up, {state['running']} running, "
        f"{waiting} waiting, {state['counters']['moves']} moves"
    )
    second = (
        f"{_number(vitals['tokens_per_s'])} tokens/s; first token p50 {_ms(vitals['ttft_ms']['p50'])}, "
        f"p95 {_ms(vitals['ttft_ms']['p95'])}; between tokens p50 {_ms(vitals['itl_ms']['p50'])}, "
        f"p95 {_ms(vitals['itl_ms']['p95'])}"
    )
    return first, second


def node_rows(state: dict[str, Any]) -> list[NodeRow]:
    return [_row(node) for node in state["nodes"]]


def plain_lines(state: dict[str, Any]) -> list[str]:
    """Write the whole picture for a file or a pipe."""
    rows = [COLUMNS, *(row.cells for row in node_rows(state))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_aligned(row, widths) for row in rows]
    return [*summary_lines(state), "", *lines, *_details(state)]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell.ljust(width) if name in LEFT else cell.rjust(width)
        for name, cell, width in zip(COLUMNS, row, widths, strict=True)
    )
    return "  ".join(cells).rstrip()


def _details(state: dict[str, Any]) -> list[str]:
    """Why nodes are not up, in their own words."""
    return [
        f"{clean(str(node['name']), CELL_CHARS_MAX)}: {clean(str(node['detail']))}"
        for node in state["nodes"]
        if node["detail"]
    ]


def _row(node: dict[str, Any]) -> NodeRow:
    used = _percent(node["blocks_used"], node["blocks"])
    cells = (
        clean(str(node["name"]), CELL_CHARS_MAX),
        clean(str(node["state"]), CELL_CHARS_MAX),
        f"{node['lanes_busy']}/{node['lanes']}",
        _bar(node["lanes_busy"], node["lanes"]),
        str(node["queued"]),
        f"{used}%" if node["blocks"] else "-",
        _number(node["tokens_per_s"]),
        _number(node["prefill_rate"]) if node["prefill_rate"] else "-",
        clean(str(node["circuit"]), CELL_CHARS_MAX),
        clean(",".join(map(str, node["models"])), CELL_CHARS_MAX) or "-",
    )
    return NodeRow(str(node["state"]), cells, used >= HIGH_PCT)


def _bar(part: int, whole: int) -> str:
    """Draw a share in cells that every terminal and every file can show."""
    filled = 0 if whole <= 0 else min(BAR_CELLS, -(-BAR_CELLS * part // whole))
    return "#" * filled + "." * (BAR_CELLS - filled)


def _percent(part: int, whole: int) -> int:
    return 0 if whole <= 0 else round(100 * part / whole)


def _number(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1_000:.1f} s" if value >= 10_000 else f"{value:,.0f} ms"


# --- on a terminal ---


def _watch(state: Callable[[], dict[str, Any]], interval_s: float) -> None:
    """Redraw until interrupted. Raises SuperfluidError when the head refuses, or was never there."""
    from rich.console import Console
    from rich.live import Live

    pause, shown = threading.Event(), _pictured(state())
    with Live(shown, console=Console(), auto_refresh=False) as live:
        try:
            while True:
                pause.wait(interval_s)
                live.update(_again(state, shown), refresh=True)
        except KeyboardInterrupt:
            return


def _again(state: Callable[[], dict[str, Any]], shown: RenderableType) -> RenderableType:
    """Draw anew; what a head that is gone said last stays, and why it is out of date is said."""
    from rich.console import Group
    from rich.text import Text

    try:
        return _pictured(state())
    except SuperfluidError as error:
        if error.code is not ErrorCode.NO_WORKER:
            raise
        return Group(shown, Text(f"out of date: {clean(error.message)}", style="red"))


def _pictured(state: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    first, second = summary_lines(state)
    style = "bold green" if state["ready"] else "bold red"
    details = [Text(line, style="red") for line in _details(state)]
    return Group(Text(first, style=style), Text(second), _table(state), *details)


def _table(state: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for row in node_rows(state):
        texts = [Text(cell) for cell in row.cells]
        texts[1].stylize(STYLES.get(row.state, ""))
        texts[5].stylize("red" if row.is_full else "")
        table.add_row(*texts)
    return table
