"""Log-probabilities in the API's shape: what is kept of them when they have been written."""

from __future__ import annotations

import tracemalloc

from superfluid_core.session import TokenLogprobs
from superfluid_head.api.logprobs import content_entries
from superfluid_head.text.channel import Sampled

WORDS = 20_000
KEPT_BYTES_MAX = 65_536


def _word(token: int) -> bytes:
    return b" word %d" % token


def test_nothing_is_kept_of_the_words_of_a_vocabulary_once_they_are_written() -> None:
    top = tuple((token, -1.0) for token in range(WORDS))
    tokens = [Sampled(7, TokenLogprobs(-0.5, top))]
    tracemalloc.start()
    try:
        content_entries(tokens[:1], _word, 1)
        before, _ = tracemalloc.get_traced_memory()
        entries = content_entries(tokens, _word, WORDS)
        while_held, _ = tracemalloc.get_traced_memory()
        assert entries[0]["top_logprobs"][9]["token"] == " word 9"
        del entries
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert while_held - before > 10 * KEPT_BYTES_MAX
    assert after - before < KEPT_BYTES_MAX
