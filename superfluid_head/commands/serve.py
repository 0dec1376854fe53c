"""`superfluid serve`: parses and judges, then hands over to `server.py`, which is imported only then.

Errors that a person can mend are one line; see `cli.py` for the exit statuses.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import click

from superfluid_core.clock import SystemClock
from superfluid_core.logs import setup_logging
from superfluid_core.options import EPILOG, add_flags
from superfluid_head.config import OPTIONS, build_config, read_settings, surroundings

FLAGS = tuple(option for option in OPTIONS if option.name != "model")


@click.command("serve", epilog=EPILOG)
@click.argument("model", nargs=-1)
@click.option("--config", "config_file", metavar="FILE", help="TOML file of these settings.")
@add_flags(FLAGS)
def serve(model: tuple[str, ...], config_file: str | None, **flags: Any) -> None:
    """Serve one OpenAI-compatible endpoint over a fleet of nodes.

    MODEL is a directory, a .gguf file, a hub id, or 'demo'. Without --fleet a node for it runs on this machine; with
    --fleet it is only needed when the head should not fetch tokenizer and template from the nodes.
    """
    settings, around = read_settings({"model": model, **flags}, config_file), surroundings()
    config = build_config(settings, around)
    setup_logging(config.log_format, config.log_level, "superfluid")
    # Nothing that is made while starting is garbage: the collector sleeps until `run_head` is ready.
    gc.disable()
    from superfluid_head.http_server import new_loop
    from superfluid_head.server import run_head

    place = None
    if config.workers > 1:
        # With what only workers need, an HTTP client, loaded once: before they are forked.
        import superfluid_head.workers.siblings  # noqa: F401
        from superfluid_head.workers.serve import become_worker

        worker = become_worker(config, lambda told: build_config(settings, told), SystemClock())
        if worker is None:
            return
        config, place = worker
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run_head(config, SystemClock(), place))
