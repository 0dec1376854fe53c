"""Asks the programs themselves whether they would take a command line of a deployment file, with the files that it would find there.

Paths of a container or host are mapped to files of this repository or of a test; everything else goes through the programs'
own tables, parsers and judgement.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from superfluid_core.link.keys import write_key_file
from superfluid_head import config as head
from superfluid_head.cli import command as head_command
from superfluid_noded import config as node
from superfluid_noded.cli import command as node_command
from tests.deploy.supervision import ROOT

DEPLOY = ROOT / "deploy"
SECRET = "0123456789abcdef0123456789abcdef"

Files = Mapping[str, Path]
Config = head.HeadConfig | node.NodeConfig


def secrets(folder: Path, where: str) -> dict[str, Path]:
    """Make what deployments keep secret, known under `where`."""
    key, api, token = folder / "fleet.key", folder / "api.key", folder / "metrics.token"
    if not key.exists():
        write_key_file(key)
        for path in (api, token):
            path.write_text(SECRET + "\n", encoding="utf-8")
            path.chmod(0o440)
    return {f"{where}/{path.name}": path for path in (key, api, token)}


def mapped(text: str, files: Files) -> str:
    for there, here in files.items():
        text = text.replace(there, str(here))
    return text


def accepted(program: str, arguments: Sequence[str], files: Files, folder: Path) -> Config:
    """Parse and judge as the program would. Raises click's and the program's own errors."""
    words = [mapped(each, files) for each in arguments]
    if program == "superfluid":
        assert words[0] == "serve", words
        group = head_command
        assert isinstance(group, click.Group)
        serve = group.get_command(click.Context(group), "serve")
        assert serve is not None
        given, file = _parsed(serve, words[1:], files, folder)
        settings = head.read_settings(given, file)
        return head.build_config(settings, head.Surroundings(None, None))
    assert program == "superfluid-noded", program
    given, file = _parsed(node_command, words, files, folder)
    settings = node.read_settings(given, file)
    return node.build_config(settings, node.Surroundings(None, None, None, None))


def _parsed(
    command: click.Command, words: Sequence[str], files: Files, folder: Path
) -> tuple[dict[str, Any], str | None]:
    context = command.make_context(command.name, list(words))
    flags = dict(context.params)
    file = flags.pop("config_file", None)
    if file is None:
        return flags, None
    text = mapped(Path(file).read_text(encoding="utf-8"), files)
    tomllib.loads(text)
    there = folder / "config.toml"
    there.write_text(text, encoding="utf-8")
    return flags, str(there)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Read a Dockerfile: continuation lines joined, comments left out."""
    lines = [
        line
        for line in dockerfile.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, rest in pairs]
