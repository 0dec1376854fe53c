"""A rank beyond the first, as a process: `python -m` this module, with what it is to be as a line of JSON on stdin.

Owns nothing but its start and its end: it ends when stdin does, which is when its parent ends. What goes wrong is a line on stderr.
"""

from __future__ import annotations

import json
import select
import sys
from dataclasses import replace
from pathlib import Path

import torch

from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.device import Machine, choose_device
from superfluid_core.engine.torch.parallel.engine import follow
from superfluid_core.engine.torch.parallel.group import Place, Ranks, find_store
from superfluid_core.errors import SuperfluidError
from superfluid_core.modelfiles.resolve import ModelFiles

LINE_BYTES_MAX = 65_536


def parent_lives() -> bool:
    """Whether stdin is still open; nothing is ever written to it after the first line."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
    return not ready


def main() -> None:
    """Join, build, follow."""
    told = json.loads(sys.stdin.buffer.readline(LINE_BYTES_MAX))
    options = TorchOptions(**told["options"])
    place = Place(**told["place"])
    files = ModelFiles(Path(told["path"]), told["kind"], told["name"])
    device = choose_device(options.device, Machine())
    ranks = Ranks(place, device, find_store(place))
    engine = build_torch_engine(files, replace(options, ranks=ranks))
    follow(engine, ranks, parent_lives)


if __name__ == "__main__":
    torch.set_grad_enabled(mode=False)
    try:
        main()
    except (SuperfluidError, RuntimeError, ValueError, OSError) as failure:
        sys.stderr.write(f"rank: {failure}\n")
        raise SystemExit(1) from None
