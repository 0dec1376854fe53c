"""Token buckets: the burst, the rate, the truth of the hint, and the bound."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_head.access.ratelimit import MS_NS, SECOND_NS, RateLimit, TokenBuckets


def test_a_burst_passes_and_then_the_rate_holds() -> None:
    buckets = TokenBuckets(RateLimit(10, 20))
    assert [buckets.take("a", 0) for _ in range(20)] == [None] * 20
    assert buckets.take("a", 0) == 100
    assert buckets.take("a", 99 * MS_NS) == 1
    assert buckets.take("a", 100 * MS_NS) is None
    assert buckets.take("a", 100 * MS_NS) == 100
    assert [buckets.take("a", 10 * SECOND_NS) for _ in range(21)].count(None) == 20


def test_clients_do_not_share_a_bucket_and_no_rate_is_no_limit() -> None:
    buckets = TokenBuckets(RateLimit(1, 1))
    assert buckets.take("a", 0) is None
    assert buckets.take("a", 0) == 1_000
    assert buckets.take("b", 0) is None
    free = TokenBuckets(RateLimit(0, 1))
    assert [free.take("a", 0) for _ in range(1_000)] == [None] * 1_000
    assert len(free) == 0


def test_the_client_heard_least_recently_is_forgotten() -> None:
    buckets = TokenBuckets(RateLimit(1, 1), clients_max=2)
    for client in ("a", "b", "c"):
        buckets.take(client, 0)
    assert len(buckets) == 2
    assert buckets.take("a", 0) is None
    assert buckets.take("c", 0) == 1_000


@settings(max_examples=100)
@given(
    st.integers(1, 50), st.integers(1, 30), st.lists(st.integers(0, 500), min_size=1, max_size=80)
)
def test_who_waits_as_long_as_told_is_served_and_no_window_exceeds_burst_and_rate(
    rate: int, burst: int, pauses_ms: list[int]
) -> None:
    buckets = TokenBuckets(RateLimit(rate, burst))
    now_ns = 0
    served: list[int] = []
    for pause_ms in pauses_ms:
        now_ns += pause_ms * MS_NS
        wait_ms = buckets.take("a", now_ns)
        if wait_ms is not None:
            assert wait_ms >= 1
            now_ns += wait_ms * MS_NS
            assert buckets.take("a", now_ns) is None
        served.append(now_ns)
    for first in range(len(served)):
        for last in range(first, len(served)):
            window_ns = served[last] - served[first]
            assert last - first + 1 <= burst + window_ns * rate / SECOND_NS + 1
