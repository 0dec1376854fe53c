"""What is said when a fleet comes up: which nodes were not reached yet, and the windows in force."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from superfluid_core.logs import log
from superfluid_head.fleet.directory import ServedModel
from superfluid_head.fleet.nodestate import NodeState

logger = logging.getLogger(__name__)


async def tried(nodes: Iterable[NodeState], timeout_s: float) -> None:
    """Wait for a moment until each node was tried once; names those that were not."""
    nodes = list(nodes)
    try:
        async with asyncio.timeout(timeout_s):
            for node in nodes:
                await node.tried.wait()
    except TimeoutError:
        pending = [node.title for node in nodes if not node.tried.is_set()]
        log(logger, "warning", "nodes not reached yet", nodes=", ".join(pending))


def say_windows(models: Iterable[ServedModel]) -> None:
    """Log the context window of each model that is up."""
    for model in models:
        if model.is_up:
            window = f"context window {model.window} tokens (the largest node's)"
            log(logger, "info", f"{model.name}: {window}")
