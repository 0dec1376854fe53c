"""Quotas of keys: requests and tokens a minute, slots."""

from __future__ import annotations

import pytest

from superfluid_core.clock import SECOND
from superfluid_core.errors import CapacityError, ErrorCode
from superfluid_head.access.keys import Principal
from superfluid_head.access.quotas import Quotas

PACED = Principal("paced", rate_limit_rpm=6)
COUNTED = Principal("counted", tokens_per_minute=600)
FEW = Principal("few", max_concurrent=2)


def refusal(quotas: Quotas, principal: Principal, now_ns: int) -> CapacityError:
    with pytest.raises(CapacityError) as caught:
        quotas.take_request(principal, now_ns)
    assert caught.value.code is ErrorCode.RATE_LIMIT_EXCEEDED
    return caught.value


def test_a_minutes_requests_come_at_once_and_then_in_turn() -> None:
    quotas = Quotas()
    for _ in range(6):
        quotas.take_request(PACED, 0)
    assert refusal(quotas, PACED, 0).retry_after_ms == 10_000
    quotas.take_request(PACED, 10 * SECOND)
    refusal(quotas, PACED, 10 * SECOND)
    for _ in range(99):
        quotas.take_request(Principal("free"), 0)


def test_tokens_are_charged_when_used_and_a_debt_is_waited_for() -> None:
    quotas = Quotas()
    quotas.take_request(COUNTED, 0)
    quotas.charge(COUNTED, 599, 0)
    quotas.take_request(COUNTED, 0)
    quotas.charge(COUNTED, 601, 0)
    assert refusal(quotas, COUNTED, 0).retry_after_ms == 60_100
    refusal(quotas, COUNTED, 60 * SECOND)
    quotas.take_request(COUNTED, 60 * SECOND + SECOND // 10)


def test_a_policy_that_is_read_again_holds_for_what_was_used_before() -> None:
    quotas = Quotas()
    for _ in range(6):
        quotas.take_request(PACED, 0)
    quotas.take_request(Principal("paced"), 0)
    refusal(quotas, PACED, 0)
    quotas.take_request(Principal("paced", rate_limit_rpm=600), 11 * SECOND)


def test_slots_come_back_however_they_are_left() -> None:
    quotas = Quotas()
    with quotas.hold(FEW), quotas.hold(FEW):
        assert quotas.in_flight("few") == 2
        with pytest.raises(CapacityError) as caught:
            quotas.take_slots(FEW)
        assert caught.value.code is ErrorCode.CONCURRENCY_LIMIT_EXCEEDED
        assert caught.value.retryable
    with pytest.raises(KeyError), quotas.hold(FEW, 2):
        raise KeyError
    assert quotas.in_flight("few") == 0
    with quotas.hold(FEW), pytest.raises(CapacityError) as caught:
        quotas.take_slots(FEW, 2)
    assert not caught.value.retryable, "so many choices never fit"
    with quotas.hold(Principal("free"), 1_000):
        assert quotas.in_flight("free") == 1_000
