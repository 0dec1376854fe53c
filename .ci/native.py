"""The optional compiled build: the three packages once more, with the pure hot modules of the core compiled by mypyc.

    .venv/bin/python .ci/native.py -q build --build-base .venv/native-build --build-lib .venv/native      what `make native` does

Nothing needs it and nothing else knows of it: the sources are compiled as they are, and whoever puts the folder in front
(`PYTHONPATH`) gets the compiled modules under the same names. mypyc takes type hints at their word and checks them at the
border, so `make lint` has to be clean first. Name, version and packages come from pyproject.toml.
"""

from __future__ import annotations

from pathlib import Path

from mypyc.build import mypycify
from setuptools import setup

CORE = Path("superfluid_core")
FOLDERS = ("kv", "scheduler", "placement", "simulator")
FILES = (
    CORE / "limits.py",
    CORE / "session.py",
    # asks whether lanes are `LanePlans`: of a compiled class with an abstract base only compiled code is told the truth
    CORE / "engine/compose.py",
    CORE / "engine/sim.py",
    CORE / "engine/stand_ins.py",
    # derives from the scheduler, and only compiled classes derive from compiled ones
    Path("superfluid_noded/recording.py"),
)
WORK = Path(".venv/native-build")


def sources() -> list[str]:
    """List what is compiled, as one group: calls between these modules become C calls."""
    paths = [path for folder in FOLDERS for path in (CORE / folder).glob("*.py")]
    return sorted(str(path) for path in (*paths, *FILES) if path.name != "__init__.py")


WORK.mkdir(parents=True, exist_ok=True)
setup(
    ext_modules=mypycify(
        sources(),
        group_name="superfluid",
        opt_level="3",
        debug_level="0",
        multi_file=True,
        target_dir=str(WORK),
    )
)
