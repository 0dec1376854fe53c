"""Starts the ranks of an engine: rank 0 in this process, the others as children, and makes them one `Engine`.

Owns the children: they read nothing but one line, hear everything else from rank 0, and are ended with it. Each has the device of its rank.
A model that cannot be cut evenly is refused before any of them starts.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace

import torch

from superfluid_core.clock import SECOND, Clock
from superfluid_core.engine.torch.build import Say, TorchOptions, build_torch_engine, ignore
from superfluid_core.engine.torch.device import Machine, choose_device
from superfluid_core.engine.torch.parallel.engine import LeadingEngine
from superfluid_core.engine.torch.parallel.group import Place, Ranks, open_store
from superfluid_core.engine.torch.parallel.shards import local_config
from superfluid_core.errors import ConfigError, EngineError
from superfluid_core.logs import log
from superfluid_core.modelfiles.resolve import ModelFiles

WORLD_MAX = 16
END_SECONDS, KILLED_SECONDS = 5.0, 5.0
Child = subprocess.Popen[bytes]

_logger = logging.getLogger(__name__)


def build_parallel(
    files: ModelFiles, options: TorchOptions, world: int, clock: Clock, say: Say = ignore
) -> LeadingEngine:
    """Make an engine of `world` ranks. Raises ConfigError or EngineError with words for a person."""
    local_config(files.config, world)
    machine = Machine()
    device = choose_device(options.device, machine)
    if device.type == "cuda" and torch.cuda.device_count() < world:
        raise ConfigError(
            f"--tensor-parallel {world}: {torch.cuda.device_count()} devices are here"
        )
    places = [_device_of(device, rank) for rank in range(world)]
    children: list[Child] = []
    try:
        store, port = open_store(world)
        for rank in range(1, world):
            own = replace(options, device=places[rank])
            children.append(_start(files, own, Place(rank, world, port)))
        ranks = Ranks(Place(0, world, port), torch.device(places[0]), store)
        own = replace(options, device=places[0], ranks=ranks)
        inner = build_torch_engine(files, own, clock, machine, say=say)
    except BaseException as error:
        end(children, clock)
        if isinstance(error, RuntimeError):
            text = str(error).splitlines()[0][:200]
            raise EngineError(f"the ranks did not come together: {text}") from error
        raise
    return LeadingEngine(inner, ranks, lambda: end(children, clock))


def _device_of(device: torch.device, rank: int) -> str:
    return "cpu" if device.type == "cpu" else f"cuda:{rank}"


def _start(files: ModelFiles, options: TorchOptions, place: Place) -> Child:
    command = [sys.executable, "-m", "superfluid_core.engine.torch.parallel.worker"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    told = {
        "place": asdict(place),
        "options": asdict(replace(options, cache_dir=None)),
        "path": str(files.path),
        "kind": files.kind,
        "name": files.name,
    }
    assert child.stdin is not None
    child.stdin.write(json.dumps(told).encode() + b"\n")
    child.stdin.flush()
    return child


def end(children: Sequence[Child], clock: Clock) -> None:
    """End the other ranks, all within one time; what does not end is killed, and what the kernel keeps even then is left and told."""
    for child in children:
        if child.stdin is not None:
            with suppress(BrokenPipeError):
                child.stdin.close()
        child.terminate()
    left = _wait(children, clock, END_SECONDS)
    for child in left:
        child.kill()
    for child in _wait(left, clock, KILLED_SECONDS):
        log(_logger, "error", "a rank does not end although it was killed", pid=child.pid)


def _wait(children: Sequence[Child], clock: Clock, seconds: float) -> list[Child]:
    """Wait for all of them so long; returns those that have not ended."""
    deadline_ns = clock.now_ns() + round(seconds * SECOND)
    left: list[Child] = []
    for child in children:
        try:
            child.wait(max(0.0, (deadline_ns - clock.now_ns()) / SECOND))
        except subprocess.TimeoutExpired:
            left.append(child)
    return left
