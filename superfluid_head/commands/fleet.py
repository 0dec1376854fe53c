"""`superfluid fleet`: what concerns the fleet as a whole. For now: its key."""

from __future__ import annotations

from pathlib import Path

import click

from superfluid_core.errors import ConfigError
from superfluid_head.commands.groups import SuggestingGroup

DEFAULT_KEY_FILE = "fleet.key"


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
