"""The chaos harness itself: the checker finds what is planted, the proxy breaks what it says, links tell the truth."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.link.tls import write_key_file
from superfluid_head.bench.load import Answer
from tests.chaos.exchange import exchange_struck, serving
from tests.chaos.history import COMPLETE, Entry, Event, History, Judgement, judge
from tests.chaos.oracle import Expected
from tests.chaos.proxy import ChaosProxy, End, Way

TEXT = "one two three four five six seven"
LAW = Expected(TEXT, 9, 7)


def answer(text: str = TEXT, **changes: Any) -> Answer:
    times = [100.0 * n for n in range(1, 8)]
    made = Answer(
        0.0, 750.0, text, times, finish_reason="length", prompt_tokens=9, completion_tokens=7,
        request_id="r", is_done=True, endings=list(COMPLETE),
    )  # fmt: skip
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def judged(*answers: Answer, may_fail: bool = False) -> Judgement:
    history = History([Entry({}, one, may_fail) for one in answers])
    return judge(history, lambda _body: LAW)


def test_a_right_answer_passes() -> None:
    found = judged(answer())
    assert (found.problems, found.equal, found.failed) == ([], 1, 0)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"text": TEXT.replace("three ", "")}, "oracle"),
        ({"text": TEXT.replace("three", "three three")}, "oracle"),
        ({"text": TEXT[:-1]}, "oracle"),
        ({"text": TEXT + " eight"}, "oracle"),
        ({"text": TEXT.replace("four", "fore")}, "oracle"),
        ({"completion_tokens": 8}, "usage"),
        ({"prompt_tokens": 8}, "usage"),
        ({"endings": ["finish", "finish", "usage", "done"]}, "terminal"),
        ({"endings": ["finish", "usage", "done", "done"]}, "terminal"),
        ({"endings": ["finish", "usage", "done", "late"]}, "behind an end"),
        ({"endings": ["error", "done"], "error": "boom"}, "behind an error"),
        ({"endings": ["usage", "done"]}, "without finish"),
        ({"endings": ["error"], "error": "boom", "text": TEXT[:5]}, "failed"),
        ({"endings": [], "error": "cut", "is_done": False, "text": "one tow"}, "oracle"),
    ],
)
def test_what_is_wrong_with_an_answer_is_found(changes: dict[str, Any], word: str) -> None:
    problems = judged(answer(**changes)).problems
    assert any(word in problem for problem in problems), problems


def test_lost_and_repeated_text_are_told_apart() -> None:
    lost, again = TEXT.replace("three ", ""), TEXT.replace("three four", "three three four")
    assert (judged(answer(lost)).lost, judged(answer(lost)).duplicated) == (1, 0)
    assert judged(answer(again)).duplicated == 1


def test_a_broken_answer_may_be_any_prefix_when_it_may_fail() -> None:
    broken = answer(TEXT[:9], endings=[], error="cut", is_done=False)
    found = judged(broken, may_fail=True)
    assert (found.problems, found.failed, found.complete) == ([], 0, 0)


def test_only_answers_that_moved_or_stood_still_have_gaps() -> None:
    calm, moved = answer(), answer(request_id="m")
    still = answer(at_ms=[100.0, 900.0], ended_ms=950.0)
    events = [Event(1.0, "moved", {"request": "m"})]
    history = History([Entry({}, one) for one in (calm, moved, still)], events)
    assert sorted(judge(history, lambda _body: LAW).gaps_ms) == [100.0, 800.0]


@pytest.mark.parametrize(
    ("late_ms", "gap_ms"),
    [
        ([], 800.0),
        ([(50.0, 40.0), (500.0, 300.0), (940.0, 30.0)], 800.0),
        ([(905.0, 200.0)], 605.0),
        ([(895.0, 200.0)], 595.0),
        ([(880.0, 200.0)], 800.0),
        ([(900.0, 5_000.0)], 0.0),
    ],
)
def test_only_what_the_measuring_process_slept_through_at_the_end_of_a_gap_is_taken_off(
    late_ms: list[tuple[float, float]], gap_ms: float
) -> None:
    still = answer(at_ms=[100.0, 900.0], ended_ms=950.0)
    found = judge(History([Entry({}, still)], late_ms=late_ms), lambda _body: LAW, 0.0)
    assert (found.gaps_ms, found.raw_gaps_ms) == ([gap_ms], [800.0])


# --- the proxy ------------------------------------------------------------------------------------


class Ends:
    """A client and a server with a proxy between them."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(5)
        self.proxy = ChaosProxy(f"127.0.0.1:{self.listener.getsockname()[1]}")
        self.sockets: list[socket.socket] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        host, _, port = self.proxy.address.rpartition(":")
        near = socket.create_connection((host, int(port)), timeout=5)
        self.sockets.append(near)
        far, _ = self.listener.accept()
        far.settimeout(5)
        self.sockets.append(far)
        return near, far

    def close(self) -> None:
        self.proxy.close()
        for one in (*self.sockets, self.listener):
            one.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_bytes_pass_both_ways_and_a_bit_is_flipped_where_asked(ends: Ends) -> None:
    near, far = ends.pair()
    near.sendall(b"up")
    assert far.recv(9) == b"up"
    far.sendall(b"down")
    assert near.recv(9) == b"down"
    ends.proxy.wound(Way.DOWN, 2, bit=0)
    far.sendall(b"aaaa")
    assert near.recv(9) == b"aa`a"
    assert ends.proxy.broken == 1


def test_a_cut_lets_nothing_behind_it_pass(ends: Ends) -> None:
    near, far = ends.pair()
    ends.proxy.wound(Way.UP, 3, end=End.FIN)
    near.sendall(b"abcdef")
    assert far.recv(9) == b"abc"
    assert far.recv(9) == b""
    near, _ = ends.pair()
    ends.proxy.cut(End.RST)
    with pytest.raises(ConnectionResetError):
        near.recv(1)


def test_a_black_hole_keeps_what_it_holds_and_hides_the_end(ends: Ends) -> None:
    near, far = ends.pair()
    ends.proxy.hold(Way.DOWN)
    far.sendall(b"late")
    near.sendall(b"up")
    assert far.recv(9) == b"up"
    near.settimeout(0.2)
    with pytest.raises(TimeoutError):
        near.recv(9)
    ends.proxy.hold()
    near.close()
    far.settimeout(0.2)
    with pytest.raises(TimeoutError):
        far.recv(9)
    ends.proxy.release()
    far.settimeout(5)
    assert far.recv(9) == b""


def test_refused_connections_are_refused_and_come_back_on_the_same_port(ends: Ends) -> None:
    ends.proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        ends.pair()
    ends.proxy.accept()
    near, far = ends.pair()
    near.sendall(b"again")
    assert far.recv(9) == b"again"


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_link_cut_anywhere_tells_a_prefix_and_its_end() -> None:
    async def cut() -> None:
        async with serving(None) as bench:
            assert (await bench.once()).is_whole
            for end in End:
                came = await exchange_struck(bench, range(1, 4_000, 97), Way.DOWN, end)
                assert came["struck"] > 40
                assert came["false"] == came["late"] == 0, came
                assert came["whole"] == 0, came

    asyncio.run(cut())


@pytest.mark.slow
def test_a_flipped_bit_is_never_a_wrong_token(tmp_path: Path) -> None:
    async def flip() -> None:
        async with serving(write_key_file(tmp_path / "fleet.key")) as bench:
            assert (await bench.once()).is_whole
            for way in Way:
                came = await exchange_struck(bench, range(0, 2_400, 61), way, "bit")
                assert came["false"] == came["late"] == came["whole"] == 0, came

    asyncio.run(flip())
