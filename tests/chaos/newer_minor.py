"""Runs one of our programs as the next minor of the link: a higher number and a feature that the other end does not know.

python newer_minor.py -- /path/to/superfluid-noded ARGUMENTS
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> None:
    command = sys.argv[sys.argv.index("--") + 1 :]
    is_node = command[0].endswith("superfluid-noded")
    program = importlib.import_module("superfluid_noded.cli" if is_node else "superfluid_head.cli")
    importlib.import_module("superfluid_noded.server" if is_node else "superfluid_head.server")
    ours = [module for name, module in sys.modules.items() if name.startswith("superfluid_")]
    speakers: list[Any] = [module for module in ours if hasattr(module, "MINOR")]
    for module in speakers:
        module.MINOR = 1
        if hasattr(module, "FEATURES"):
            module.FEATURES = (*module.FEATURES, "of-the-next-minor")
    if len(speakers) < 2:
        sys.exit("nobody here knows the minor any more")
    sys.argv = command
    program.main()


if __name__ == "__main__":
    main()
