"""`make demo`: a head and two nodes on this machine, a streamed chat, and the serving node killed in the middle of it.

Shows what the product promises with nothing but its own programs and the official `openai` client: the same question twice,
greedy; the first answer is left alone, during the second one the node that serves it gets SIGKILL. Both texts are
shown, a difference is marked and never hidden, and so is the pause that the reader saw. Exit 0 only when
the second answer completed. Every process that it starts is ended by its own id, whatever happens.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import click

from superfluid_head.bench.report import median
from superfluid_head.bench.rig import Rig, RigError, ended_by_signals
from superfluid_head.bench.small_fleet import MOCK_FLAGS, SmallFleet, real_flags

QUESTION = "Write a short story about a lighthouse keeper who repairs the lamp during a storm."
REQUEST_SECONDS = 180.0
WIDTH = 88


@dataclass(slots=True)
class Reply:
    """One streamed answer: its pieces with their arrival, who served it, how it ended."""

    node: str = "?"
    pieces: list[str] = field(default_factory=list)
    at_ms: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def gaps_ms(self) -> list[float]:
        return [b - a for a, b in pairwise(self.at_ms)]


def openai_client(url: str) -> Any:
    """Make the official client, which the development environment has; retries are off, so nothing is papered over."""
    try:
        import openai
    except ImportError:
        raise RigError(
            "the demo speaks through the openai package: run it with `make demo`"
        ) from None
    http = openai.DefaultHttpxClient(trust_env=False, timeout=REQUEST_SECONDS)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)


def ask(fleet: SmallFleet, tokens: int, on_piece: Callable[[Reply], None] | None = None) -> Reply:
    """Stream one answer at temperature 0. Raises openai.APIError when it breaks."""
    client = openai_client(fleet.url)
    stream = client.chat.completions.create(
        model=fleet.served,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        seed=1,
        max_completion_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    reply = Reply()
    for chunk in stream:
        if chunk.usage is not None:
            reply.completion_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            reply.finish_reason = choice.finish_reason or reply.finish_reason
            if choice.delta.content:
                reply.pieces.append(choice.delta.content)
                reply.at_ms.append(fleet.rig.now_ms())
                if len(reply.pieces) == 1:
                    reply.node = fleet.serving().name
                if on_piece is not None:
                    on_piece(reply)
    return reply


def block(text: str, bar: str = "  | ") -> str:
    lines = [w for line in text.splitlines() or [""] for w in textwrap.wrap(line, WIDTH) or [""]]
    return "\n".join(bar + line for line in lines)


def first_difference(a: str, b: str) -> int | None:
    if a == b:
        return None
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def show_comparison(unbroken: Reply, moved: Reply, killed_at: int) -> None:
    """Both endings, their difference if there is one, and the pause."""
    kept, rest = "".join(moved.pieces[:killed_at]), "".join(moved.pieces[killed_at:])
    click.echo(f"\nThe same question; {moved.node} gets SIGKILL after piece {killed_at}:")
    click.echo(block(kept))
    click.secho(f"  X {moved.node} is dead here; the other node goes on", bold=True)
    click.echo(block(rest))
    at = first_difference(unbroken.text, moved.text)
    click.echo("")
    if at is None:
        click.echo(f"answers:  equal, {len(moved.text.encode())} bytes")
    else:
        click.echo(f"answers:  DIFFERENT from character {at} on")
        click.echo(block(unbroken.text[at:], "  unbroken | "))
        click.echo(block(moved.text[at:], "  moved    | "))
        click.echo(
            "  Two greedy runs part where the best two tokens are nearly tied and the sums were added in another order;\n"
            "  the second text is a valid continuation of what had been delivered, but it is not the same text."
        )
    tokens = f"{unbroken.completion_tokens} and {moved.completion_tokens}"
    click.echo(
        f"tokens:   {tokens} (usage; finish {unbroken.finish_reason} and {moved.finish_reason})"
    )
    gaps = moved.gaps_ms()[max(0, killed_at - 1) :]
    click.echo(
        f"gap:      {max(gaps, default=0.0):.0f} ms where the node died; "
        f"normally {median(unbroken.gaps_ms()):.0f} ms between pieces"
    )


def is_complete(reply: Reply, killed_at: int) -> bool:
    return reply.finish_reason in ("stop", "length") and len(reply.pieces) > killed_at


def run_demo(fleet: SmallFleet, tokens: int) -> bool:
    """Both answers. True when the moved one completed."""
    click.echo(f"\nUnbroken answer to: {QUESTION}")
    unbroken = ask(fleet, tokens)
    click.echo(block(unbroken.text))
    click.echo(f"  ({unbroken.node}, {unbroken.completion_tokens} tokens)")
    kill_at = max(2, len(unbroken.pieces) // 3)
    victim: list[str] = []

    def kill_once(reply: Reply) -> None:
        if not victim and len(reply.pieces) >= kill_at:
            victim.append(reply.node)
            fleet.rig.named(reply.node).kill()

    moved = ask(fleet, tokens, kill_once)
    show_comparison(unbroken, moved, kill_at)
    return bool(victim) and is_complete(moved, kill_at)


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--mock", is_flag=True, help="Use the simulated engine: no weights are loaded.")
@click.option("--model", default="demo", show_default=True, help="What the nodes serve.")
@click.option("--tokens", default=120, show_default=True, help="Length of each answer.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    help="Numbers of the engine. In float32 near ties are rare, so the two answers usually agree; "
    "auto is what a node would choose.",
)
@click.option("--logs", is_flag=True, help="Show the logs of all processes at the end.")
def main(mock: bool, model: str, tokens: int, dtype: str, logs: bool) -> None:  # noqa: FBT001 - click passes them by name
    flags = MOCK_FLAGS if mock else real_flags(2, dtype=dtype)
    with ended_by_signals(), Rig() as rig:
        try:
            started_ms = rig.now_ms()
            click.echo("superfluid demo: a fresh key, two nodes and a head on loopback ...")
            fleet = SmallFleet(rig, (*flags, "--model", model), model)
            for child in rig.children:
                where = fleet.url if child is fleet.head else child.listen
                click.echo(f"  {child.name:<8} pid {child.pid:<8} {where}")
            click.echo(
                f"  ready in {(rig.now_ms() - started_ms) / 1000:.1f} s, serving {fleet.served}"
            )
            is_done = run_demo(fleet, tokens)
        except RigError as error:
            raise SystemExit(f"superfluid demo: {error}") from None
        finally:
            if logs:
                for child in rig.children:
                    click.echo(f"\n--- {child.name} (pid {child.pid})\n{child.log_text()}")
    click.echo(f"result:   the answer {'completed' if is_done else 'did NOT complete'}")
    sys.exit(0 if is_done else 1)


if __name__ == "__main__":
    main()
