"""`superfluid`: the head's program. Owns the list of commands and the exit statuses, nothing else.

Exit status: 0 ended as asked, 1 failed while running, 2 wrong usage or configuration, 3 the model cannot be served. An
expected failure is one line on stderr, never a traceback. Commands are imported only when they are used.
"""

from __future__ import annotations

import logging
import sys

import click

from superfluid_core.errors import ConfigError, ModelFilesError, SuperfluidError
from superfluid_core.logs import clean
from superfluid_head.commands.groups import Lazy, LazyGroup

PROGRAM = "superfluid"
EXIT_RUNTIME, EXIT_USAGE, EXIT_MODEL = 1, 2, 3
MESSAGE_CHARS_MAX = 500
SECRET_FLAGS = {
    "--api-key": "Keys never go on the command line: set SUPERFLUID_API_KEY or use --api-key-file."
}

COMMANDS = {
    "serve": Lazy("superfluid_head.commands.serve", "serve", "Serve an endpoint over a fleet."),
    "chat": Lazy("superfluid_head.commands.chat", "chat", "Talk to a model."),
    "fleet": Lazy("superfluid_head.commands.fleet", "fleet", "Manage the fleet."),
    "top": Lazy("superfluid_head.commands.top", "top", "Watch the nodes in the terminal."),
    "config": Lazy("superfluid_head.commands.check", "config", "Look at the configuration."),
    "bench": Lazy("superfluid_head.bench.cli", "bench", "Measure an endpoint."),
    "selftest": Lazy(
        "superfluid_head.commands.selftest", "selftest", "Check this machine's engine."
    ),
    "completion": Lazy(
        "superfluid_head.commands.completion", "completion", "Complete commands in a shell."
    ),
    "inspect": Lazy(
        "superfluid_head.commands.inspect", "inspect", "Say what is understood of a model."
    ),
    "simulate": Lazy(
        "superfluid_head.commands.simulate", "simulate", "Run the real scheduler in virtual time."
    ),
}


def _print_version(context: click.Context, _: click.Parameter, *, value: bool) -> None:
    if value:
        from superfluid_head.config import version

        click.echo(f"{PROGRAM} {version()}")
        context.exit()


@click.group(
    PROGRAM,
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, parameter, value: _print_version(context, parameter, value=value),
    help="Show the version and exit.",
)
def command() -> None:
    """One OpenAI-compatible endpoint over a fleet of GPU boxes that never drops an answer."""


def run(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        command.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except click.exceptions.Exit as exit_:
        return int(exit_.exit_code)
    except click.NoSuchOption as error:
        error.show()
        if error.option_name in SECRET_FLAGS:
            click.echo(SECRET_FLAGS[error.option_name], err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt, BrokenPipeError):
        return EXIT_RUNTIME
    except SuperfluidError as error:
        click.echo(f"{PROGRAM}: {clean(error.message, MESSAGE_CHARS_MAX)}", err=True)
        return exit_status(error)
    except Exception:
        logging.getLogger(__name__).exception("superfluid failed")
        return EXIT_RUNTIME
    return 0


def exit_status(error: SuperfluidError) -> int:
    """Map an expected failure to the status that supervisors know."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, ModelFilesError):
        return EXIT_MODEL
    return EXIT_RUNTIME


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
