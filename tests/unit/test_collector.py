"""When full collections happen: not while somebody is being served, unless there is too much."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from superfluid_core import collector as module
from superfluid_core.collector import MIDDLE_EVERY, PORTIONS_MAX, YOUNG_MAX, Collector


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def begun() -> Iterator[Collector]:
    before = gc.get_threshold()
    collector = Collector(lambda: True)
    collector.begin()
    yield collector
    gc.set_threshold(*before)
    gc.unfreeze()


def age(portions: int) -> None:
    """Make so many objects that live, as serving does."""
    kept: list[list[int]] = []
    kept.extend([] for _ in range((portions + 1) * YOUNG_MAX * (MIDDLE_EVERY + 2)))
    assert gc.get_count()[2] >= portions


def test_garbage_that_has_aged_waits_for_a_quiet_moment(begun: Collector) -> None:
    gc.collect()
    knot = Knot()
    gone = weakref.ref(knot)
    age(2)
    del knot
    age(2)
    begun.look(is_idle=False)
    assert gone() is not None
    assert begun.collections == 0
    begun.look(is_idle=True)
    assert gone() is None
    begun.look(is_idle=True)
    assert begun.collections == 1  # nothing has been made since


def test_under_work_that_never_ends_it_is_put_off_but_not_for_ever(begun: Collector) -> None:
    gc.collect()
    age(PORTIONS_MAX)
    begun.look(is_idle=False)
    assert begun.collections == 1


def test_a_portion_is_no_more_than_ten_thousand_objects(begun: Collector) -> None:
    gc.collect()
    portions: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 1:
            portions.append(sum(len(gc.get_objects(generation)) for generation in (0, 1)))

    gc.callbacks.append(note)
    try:
        age(2)
    finally:
        gc.callbacks.remove(note)
    # the youngest are looked at when they are more than YOUNG_MAX, and middle ones after more than MIDDLE_EVERY looks
    assert 0 < max(portions) <= 10_000 + 3 * YOUNG_MAX


def test_quiet_is_what_was_quiet_for_a_second_and_everything_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    before, looks = gc.get_threshold(), [False, True, True, False]
    asked: list[bool] = []
    collector = Collector(lambda: looks.pop(0) if looks else False)
    monkeypatch.setattr(collector, "look", lambda *, is_idle: asked.append(is_idle))

    async def scenario() -> None:
        collector.begin()
        assert gc.get_freeze_count() > 0
        running = asyncio.create_task(collector.run())
        while looks:  # noqa: ASYNC110 - looks at what was asked
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(scenario())
    assert asked[:4] == [False, False, True, False]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
