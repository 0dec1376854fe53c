"""For all tests: what none leaves behind, and in which order files are collected and run.

Some run a program in this process, which sets logging up for good. Files that take long begin first, so that no worker is left with one
when the others are done; those that mostly wait for processes stand between those that compute. Each worker compiles another part of the
files first and finds the rest compiled by the others. The cyclic collector leaves modules and collected tests alone, also after
a test has thawed them, as every server does that ends in this process; garbage of a file's tests is found when the file is done at the latest.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from superfluid_core.collector import MIDDLE_EVERY, YOUNG_MAX

HERE = Path(__file__).parent
LONGEST = (
    "sim/test_sim.py",
    "sim/test_machine.py",
    "chaos/test_short.py",
    "unit/engine_torch/test_invariant.py",
    "unit/engine_torch/test_demo_model.py",
    "docs/test_walks.py",
    "e2e/test_worker_faults.py",
    "unit/engine_torch/test_company.py",
    "unit/engine_cuda/test_products.py",
    "deploy/test_booted.py",
    "unit/engine_cuda/test_kernels.py",
    "unit/simulator/test_goldens.py",
    "e2e/test_cases.py",
    "failover/test_equality.py",
    "unit/head_api/test_openapi_odd.py",
    "deploy/test_watchdog.py",
    "unit/head_api/test_openapi_even.py",
    "e2e/test_real_model.py",
    "unit/test_static.py",
    "unit/test_tidy.py",
)
PLACES = {HERE / name: place for place, name in enumerate(LONGEST)}


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is None or [Path(argument).resolve() for argument in config.args] != [HERE]:
        return
    # folders where it can be: what a folder's conftest leaves out stays out
    parts = [
        path for path in (*HERE.glob("[a-z]*/"), *HERE.glob("unit/[a-z]*")) if path != HERE / "unit"
    ]
    named = sorted(str(path) for path in parts if path.is_dir() or path.match("test_*.py"))
    first = len(named) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args = named[first:] + named[:first]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (PLACES.get(item.path, len(PLACES)), str(item.path)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # nearly all that collecting makes stays
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_MAX, 2 * MIDDLE_EVERY, 2 * MIDDLE_EVERY)
        gc.enable()


class _Heap:
    """Freezes again what a test thawed: with a million objects of modules to look through, a full collection takes half a second.

    It hears of a thaw instead of asking after each test: to count what is frozen walks through it all.
    """

    def __init__(self) -> None:
        self._thaw = gc.unfreeze
        self._is_thawed = self._has_garbage = False
        gc.unfreeze = self._on_thaw

    def _on_thaw(self) -> None:
        self._thaw()
        self._is_thawed = True

    def after(self, item: pytest.Item, following: pytest.Item | None) -> None:
        if self._is_thawed:
            gc.freeze()
            self._is_thawed, self._has_garbage = False, True
        if self._has_garbage and (following is None or following.path != item.path):
            self._thaw()
            gc.collect()
            gc.freeze()
            self._has_garbage = False


HEAP = _Heap()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        HEAP.after(item, nextitem)


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    level, disabled, before = root.level, root.manager.disable, tuple(root.handlers)
    yield
    root.setLevel(level)
    logging.disable(disabled)
    for handler in tuple(root.handlers):
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)
