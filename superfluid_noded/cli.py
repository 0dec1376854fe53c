"""`superfluid-noded`: one GPU's node. Parses, judges, prints; everything else is elsewhere.

Exit status: 0 ended as asked, 1 failed while running, 2 wrong usage or configuration, 3 the model cannot be served. An
expected failure is one line on stderr, never a traceback.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from superfluid_core.clock import SystemClock
from superfluid_core.errors import ConfigError, ModelFilesError, SuperfluidError
from superfluid_core.link.addresses import format_address, judge_bind
from superfluid_core.link.causes import why_unresolved
from superfluid_core.link.keys import load_keys
from superfluid_core.link.pki import identity_in
from superfluid_core.link.tls import Credentials, server_context
from superfluid_core.logs import clean, setup_logging
from superfluid_core.options import EPILOG, Setting, add_flags
from superfluid_core.wire.schema import Role
from superfluid_noded.build import Model, check_engine, find_models
from superfluid_noded.check import report
from superfluid_noded.config import (
    OPTIONS,
    NodeConfig,
    build_config,
    read_settings,
    settle_threads,
    surroundings,
)
from superfluid_noded.inspection import inspect
from superfluid_noded.server import LoadError, NodeServer

PROGRAM = "superfluid-noded"
EXIT_RUNTIME, EXIT_USAGE, EXIT_MODEL = 1, 2, 3
MESSAGE_CHARS_MAX = 500


@click.command(
    name=PROGRAM, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="superfluid-fleet", prog_name=PROGRAM)
@click.option("--config", "config_file", metavar="FILE", help="TOML file of these settings.")
@click.option(
    "--check", is_flag=True, help="Try out settings, model, device, key and addresses, then exit."
)
@click.option("--print-config", is_flag=True, help="Print merged settings and their sources.")
@add_flags(OPTIONS)
def command(config_file: str | None, check: bool, print_config: bool, **flags: Any) -> None:  # noqa: FBT001 - click passes by name
    """Serve a model to heads."""
    settings = read_settings(flags, config_file)
    if print_config:
        _print_settings(settings)
        return
    config = build_config(settings, surroundings())
    setup_logging(config.log_format, config.log_level, PROGRAM)
    keys = _load_keys(config)
    config = _named(settings, config)
    _judge_addresses(config, has_key=keys is not None)
    settle_threads()
    settle_caches(config.cache_dir)
    models = find_models(config)
    if check:
        report(config, models, keys, _say)
        return
    check_engine(config, models[0])
    asyncio.run(_run(config, models, keys))


def settle_caches(cache: Path | None) -> None:
    """Let compiled kernels be kept where this program may write, unless the environment says where; call it before torch is loaded.

    Their own choice is the home directory, which a service need not have, or may not write to.
    """
    if cache is None:
        return
    if "TRITON_HOME" not in os.environ:
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(cache))


async def _run(config: NodeConfig, models: tuple[Model, ...], keys: Credentials | None) -> None:
    await NodeServer(config, models, keys, SystemClock(), _say).run()


def _say(line: str) -> None:
    click.echo(clean(line, MESSAGE_CHARS_MAX))
    sys.stdout.flush()


def _load_keys(config: NodeConfig) -> Credentials | None:
    if config.pki is not None:
        return config.pki
    return None if config.auth_file is None else load_keys(config.auth_file)


def _named(settings: Mapping[str, Setting], config: NodeConfig) -> NodeConfig:
    """Call the node what its own certificate says, and try the files out. Raises ConfigError."""
    if config.pki is None:
        return config
    identity = identity_in(config.pki, Role.NODE)
    if settings["identity"].value not in (None, identity):
        raise ConfigError(f"--identity is {config.identity}, but the certificate's is {identity}")
    server_context(config.pki, identity)
    return replace(config, identity=identity)


def _judge_addresses(config: NodeConfig, *, has_key: bool) -> None:
    """Resolve what is to be listened on, and refuse an open door (fleet.md 2)."""
    if not config.listen:
        return
    resolved: list[str] = []
    for host, port in config.listen:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            where = format_address(host, port)
            raise ConfigError(f"--listen {where}: {why_unresolved(error)}") from None
        resolved += [str(address[0]) for *_, address in found]
    judge_bind(resolved, has_key=has_key, insecure=config.insecure_no_auth)


def _print_settings(settings: Mapping[str, Setting]) -> None:
    """One line a setting, TOML-like, with where its value came from."""
    width = max(len(name) for name in settings)
    for name, setting in settings.items():
        value = setting.value
        shown = ",".join(map(str, value)) if type(value) is tuple else str(value)
        shown = "" if value is None else clean(shown)
        click.echo(f"{name.replace('_', '-'):<{width}} = {shown}  ({setting.source})".rstrip())


def run(arguments: list[str] | None = None) -> int:
    """Run the command, or the one that only looks at a model; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given[:1] == ["inspect"]:
            inspect.main(given[1:], prog_name=f"{PROGRAM} inspect", standalone_mode=False)
        else:
            command.main(given, prog_name=PROGRAM, standalone_mode=False)
    except click.exceptions.Exit as exit_:
        return int(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        return EXIT_RUNTIME
    except SuperfluidError as error:
        click.echo(f"{PROGRAM}: {clean(error.message, MESSAGE_CHARS_MAX)}", err=True)
        return exit_status(error)
    except Exception:
        logging.getLogger(__name__).exception("the node failed")
        return EXIT_RUNTIME
    return 0


def exit_status(error: SuperfluidError) -> int:
    """Map an expected failure to the status that supervisors know."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, ModelFilesError | LoadError):
        return EXIT_MODEL
    return EXIT_RUNTIME


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
