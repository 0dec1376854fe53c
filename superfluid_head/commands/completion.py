"""`superfluid completion`: what a shell has to read so that Tab completes both programs' commands and flags.

The scripts are click's own; they ask the programs themselves at each Tab. Nothing is installed: the words go to standard output.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
PROGRAMS = ("superfluid", "superfluid-noded")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion of SHELL for superfluid and superfluid-noded.

    bash and zsh: eval "$(superfluid completion bash)" in the shell's start file. fish: superfluid completion fish >
    ~/.config/fish/completions/superfluid.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    root = context.find_root().command
    for program in PROGRAMS:
        variable = "_" + program.replace("-", "_").upper() + "_COMPLETE"
        click.echo(kind(root, {}, program, variable).source())
