"""What waits in a stream whose reader does not read: few events, packed, and nothing of it lost or out of order."""

from __future__ import annotations

import asyncio

import pytest

from superfluid_core.limits import FleetLimits
from superfluid_core.session import QosClass, SamplingParams, TokenLogprobs
from superfluid_core.wire.columns import Cursor, PackedLogprobs, pack_logprobs, take_logprobs
from superfluid_head.fleet.events import GenerationRequest, TokensEvent
from superfluid_head.fleet.generation import GenerationMachine
from superfluid_head.fleet.stream import JOINED_MAX, JOINED_MEASURED_MAX, Generation

COUNT = 100
TOPS = 20


class _Owner:
    """A fleet that does nothing but note the classes that it is told of."""

    def __init__(self) -> None:
        self.classes: list[QosClass] = []

    async def prepare(self, generation: Generation) -> None:
        pass

    def begin(self, generation: Generation) -> None:
        pass

    def feed(self, generation: Generation, event: object) -> None:
        pass

    def finish(self, generation: Generation) -> None:
        pass

    def set_class(self, generation: Generation, qos: QosClass) -> None:
        generation.qos = qos
        self.classes.append(qos)


def _generation(owner: _Owner | None = None) -> Generation:
    request = GenerationRequest("req-1", "demo", (1,), SamplingParams(), COUNT)
    return Generation(owner or _Owner(), 1, request, GenerationMachine(request, FleetLimits()))


def _measured(token: int, tops: int = TOPS) -> TokenLogprobs:
    return TokenLogprobs(-token / 7, tuple((token + n, -token / 3 - n) for n in range(tops)))


def _packed(*rows: TokenLogprobs) -> PackedLogprobs:
    counts, data = pack_logprobs(rows, TOPS)
    return take_logprobs(counts, Cursor(data), TOPS)


def _read(generation: Generation, count: int) -> list[TokensEvent]:
    """Read events until they hold `count` ids."""

    async def read() -> list[TokensEvent]:
        found: list[TokensEvent] = []
        async with generation:
            while sum(len(event.ids) for event in found) < count:
                event = await anext(generation)
                assert isinstance(event, TokensEvent)
                found.append(event)
        return found

    return asyncio.run(read())


def test_the_fleet_hears_of_a_class_only_when_it_is_another_one() -> None:
    owner = _Owner()
    generation = _generation(owner)
    for qos in (generation.qos, QosClass.INTERACTIVE, QosClass.INTERACTIVE, QosClass.AGENT):
        generation.set_class(qos)
    assert owner.classes == [QosClass.INTERACTIVE, QosClass.AGENT]


def test_ids_with_log_probabilities_that_wait_join_packed_and_come_out_as_they_came() -> None:
    generation = _generation()
    for token in range(COUNT):
        generation.push_tokens(token, (token,), _packed(_measured(token, token % (TOPS + 1))))
    found = _read(generation, COUNT)
    assert len(found) == -(-COUNT // JOINED_MEASURED_MAX)
    assert all(isinstance(event.logprobs, PackedLogprobs) for event in found)
    assert [token for event in found for token in event.ids] == list(range(COUNT))
    assert [event.first for event in found] == list(range(0, COUNT, JOINED_MEASURED_MAX))
    measured = [each for event in found for each in event.logprobs]
    assert measured == [_measured(token, token % (TOPS + 1)) for token in range(COUNT)]


def test_ids_alone_join_up_to_their_own_bound() -> None:
    generation = _generation()
    for token in range(COUNT):
        generation.push_tokens(token, (token,), ())
    found = _read(generation, COUNT)
    assert len(found) == -(-COUNT // JOINED_MAX)
    assert [token for event in found for token in event.ids] == list(range(COUNT))


@pytest.mark.parametrize("is_first_measured", [True, False])
def test_ids_with_and_without_log_probabilities_stay_apart(is_first_measured: bool) -> None:
    generation = _generation()
    for token in range(2):
        is_measured = (token == 0) is is_first_measured
        generation.push_tokens(token, (token,), _packed(_measured(token)) if is_measured else ())
    found = _read(generation, 2)
    assert [len(event.logprobs) for event in found] == [is_first_measured, not is_first_measured]
