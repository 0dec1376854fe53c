"""Several pieces of work at once: all their results in order, or the first failure as itself and none of the others left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from superfluid_core.errors import SuperfluidError

T = TypeVar("T")


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run them all; one alone needs no task. Raises the first SuperfluidError among what went wrong."""
    works = list(works)
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        found, _ = failures.split(SuperfluidError)
        if found is None:
            raise
        raise first_of(found) from None
    return [task.result() for task in tasks]


def first_of(failures: BaseExceptionGroup[SuperfluidError]) -> SuperfluidError:
    """Return the first of what failed."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    assert isinstance(failure, SuperfluidError)
    return failure
