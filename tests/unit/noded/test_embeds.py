"""EMBED at a node: what is refused and with which code, and what is answered, in pieces."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from superfluid_core.engine.base import Capabilities, EngineInfo
from superfluid_core.engine.embedding import Embedding
from superfluid_core.errors import CapacityError, ErrorCode
from superfluid_core.limits import WireLimits
from superfluid_core.session import Determinism
from superfluid_core.wire.messages import Embed, Embedded, Refuse
from superfluid_noded.embeds import EmbedDesk

INFO = EngineInfo(
    weights_fingerprint="w", text_fingerprint="t", engine_build="b", dtype="f", device="d", vocabulary=300,
    eos_ids=(1,), window=64, lanes=2, block_tokens=16, blocks=8, step_tokens=8,
    determinism=Determinism.EXACT, capabilities=Capabilities(embeddings=True),
)  # fmt: skip
ASK = Embed(7, "m", "mean", (1, 2))


class Bench:
    """A desk with one model, a head, and all that it was sent."""

    def __init__(self, info: EngineInfo = INFO, *, has_room: bool = True) -> None:
        self.texts: list[Embedding] = []
        self.sent: list[Any] = []
        self.has_room = has_room
        self.head: Any = SimpleNamespace(number=3)
        self.roster: Any = SimpleNamespace(heads={3: self.head}, send=self.hear)
        serving: Any = SimpleNamespace(
            card=SimpleNamespace(names=("m", "n"), info=info), loop=SimpleNamespace(embed=self.take)
        )
        self.desk = EmbedDesk((serving,), cast("Any", self.roster))

    def hear(self, head: Any, messages: Any) -> None:
        assert head is self.head
        self.sent += messages

    def take(self, text: Embedding) -> bool:
        self.texts.append(text)
        return self.has_room


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ({"model": "other"}, ErrorCode.MODEL_NOT_FOUND),
        ({"pooling": "max"}, ErrorCode.UNSUPPORTED),
        ({"pooling": "logprobs-21"}, ErrorCode.UNSUPPORTED),
        ({"pooling": "logprobs-5", "ids": (1,)}, ErrorCode.INVALID_REQUEST),
        ({"ids": ()}, ErrorCode.INVALID_REQUEST),
        ({"ids": (1, 300)}, ErrorCode.INVALID_REQUEST),
        ({"ids": (1,) * 65}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
    ],
)
def test_what_the_engine_cannot_embed_is_refused(members: dict[str, Any], code: ErrorCode) -> None:
    bench = Bench()
    denial = bench.desk.take(bench.head, replace(ASK, **members))
    assert denial is not None
    assert denial.code is code
    assert not bench.texts


def test_scores_are_asked_for_in_the_same_line() -> None:
    bench = Bench()
    assert bench.desk.take(bench.head, replace(ASK, pooling="logprobs-5")) is None
    assert len(bench.texts) == 1


def test_an_engine_without_embeddings_and_a_full_line_refuse() -> None:
    denial = Bench(replace(INFO, capabilities=Capabilities())).desk.take(Bench().head, ASK)
    assert denial is not None
    assert denial.code is ErrorCode.UNSUPPORTED
    full = Bench(has_room=False)
    denial = full.desk.take(full.head, ASK)
    assert denial is not None
    assert denial.code is ErrorCode.OVERLOADED
    assert denial.retry_after_ms


def test_a_vector_goes_out_in_pieces_and_a_failure_as_a_refusal() -> None:
    bench = Bench()
    assert bench.desk.take(bench.head, replace(ASK, model="n")) is None
    piece = WireLimits().file_piece_bytes
    bench.texts[0].done(b"x" * (piece + 8))
    assert bench.sent == [
        Embedded(7, 0, 2, b"x" * piece),
        Embedded(7, 1, 2, b"x" * 8),
    ]
    bench.texts[0].done(CapacityError("no memory", code=ErrorCode.OVERLOADED, retry_after_ms=5))
    assert bench.sent[2] == Refuse(ErrorCode.OVERLOADED, "no memory", 5, 7, 0)


def test_a_text_is_wanted_as_long_as_its_head_is_linked() -> None:
    bench = Bench()
    assert bench.desk.take(bench.head, ASK) is None
    assert bench.texts[0].is_wanted()
    bench.roster.heads[3] = SimpleNamespace(number=3)
    assert not bench.texts[0].is_wanted()
