"""`superfluid config check`: the merged settings of a head, each with the source of its value; judges them together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from superfluid_core.logs import clean
from superfluid_core.options import EPILOG, Option, Setting, add_flags, source_of
from superfluid_head.commands.groups import SuggestingGroup
from superfluid_head.commands.serve import FLAGS
from superfluid_head.config import OPTIONS, build_config, read_settings, surroundings


@click.group("config", cls=SuggestingGroup)
def config() -> None:
    """Look at the configuration."""


@config.command("check", epilog=EPILOG)
@click.argument("model", nargs=-1)
@click.option("--config", "config_file", metavar="FILE", help="TOML file of these settings.")
@add_flags(FLAGS)
def check(model: tuple[str, ...], config_file: str | None, **flags: Any) -> None:
    """Print what `serve` would use with the same arguments, and where each value comes from.

    Exits with status 2 and the reason when the settings contradict each other.
    """
    settings = read_settings({"model": model, **flags}, config_file)
    print_settings(OPTIONS, settings)
    build_config(settings, surroundings())
    click.echo("ok")


def print_settings(options: tuple[Option, ...], settings: Mapping[str, Setting]) -> None:
    """Print a line per setting; secrets only say whether they are set."""
    width = max(len(option.name) for option in options)
    for option in options:
        setting = settings[option.attribute]
        click.echo(
            f"{option.name:<{width}} = {_shown(option, setting)}  ({source_of(option, setting)})"
        )


def _shown(option: Option, setting: Setting) -> str:
    if option.secret:
        return "(set)" if setting.value else "(not set)"
    if isinstance(setting.value, tuple):
        return clean(",".join(map(str, setting.value)))
    return "" if setting.value is None else clean(str(setting.value))
