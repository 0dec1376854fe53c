"""Ids in, text out: characters cut over tokens, stop strings, special tokens, and tokens that ride with their text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.session import TokenLogprobs
from superfluid_head.text.channel import Channel, ChannelOptions, Delta
from superfluid_head.text.detokenizer import Detokenizer
from superfluid_head.text.dialects.dialect import Dialect, Reading
from superfluid_head.text.dialects.events import Tool

END = b"<|im_end|>"


class Pieces:
    """A vocabulary made of given byte pieces; `specials` are those that are control tokens."""

    def __init__(self, *pieces: bytes | str, specials: tuple[bytes, ...] = (END,)) -> None:
        self.bytes = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.special_ids = frozenset(i for i, data in enumerate(self.bytes) if data in specials)
        self.ids = list(range(len(self.bytes)))

    def channel(self, *, skip_special: bool = True, **options: object) -> Channel:
        detokenizer = Detokenizer(
            lambda token: self.bytes[token], self.special_ids, skip_special=skip_special
        )
        return Channel(detokenizer, ChannelOptions(**options))  # type: ignore[arg-type]


def run(channel: Channel, ids: list[int], sizes: list[int] | None = None) -> list[Delta]:
    deltas: list[Delta] = []
    at = 0
    steps = iter(sizes or [])
    while at < len(ids) and not channel.is_stopped:
        size = next(steps, 1)
        deltas += channel.push(ids[at : at + size])
        at += size
    return [*deltas, *channel.finish()]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_o01_a_character_cut_over_tokens_comes_out_whole() -> None:
    pieces = Pieces("ok ", b"\xf0\x9f", b"\x98", b"\x80", "!")
    deltas = run(pieces.channel(), pieces.ids)
    assert [delta.text for delta in deltas] == ["ok ", "😀", "!", ""]


def test_o02_nothing_of_a_stop_string_gets_out_and_the_count_ends_at_its_last_token() -> None:
    pieces = Pieces("ABC", "DE", "FG", "HI", "J", "K")
    channel = pieces.channel(stops=("DEFGHIJ",))
    deltas = run(channel, pieces.ids)
    assert text(deltas) == "ABC"
    assert (deltas[-1].stop, deltas[-1].count) == ("DEFGHIJ", 5)
    assert channel.push([5]) == ()


def test_o03_text_that_was_held_is_delivered_at_the_end() -> None:
    pieces = Pieces("UNO ", "DUE ", "TRE")
    deltas = run(pieces.channel(stops=("TRE\nAAAA",)), pieces.ids)
    assert text(deltas) == "UNO DUE TRE"
    assert all(delta.stop is None for delta in deltas)


def test_o04_a_stop_string_that_spells_a_special_token_matches_though_it_is_not_shown() -> None:
    pieces = Pieces("Fine.", END, "\n", "more")
    deltas = run(pieces.channel(stops=("<|im_end|>\n", "</s>")), pieces.ids)
    assert text(deltas) == "Fine."
    assert (deltas[-1].stop, deltas[-1].count) == ("<|im_end|>\n", 3)


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    pieces = Pieces("a", END, "b")
    assert text(run(pieces.channel(), pieces.ids)) == "ab"
    assert text(run(pieces.channel(skip_special=False), pieces.ids)) == "a<|im_end|>b"


def test_the_id_that_ends_a_session_is_not_rendered_unless_the_stop_is_to_be_included() -> None:
    pieces = Pieces("a", "b")
    ends = frozenset({1})
    assert text(run(pieces.channel(stop_ids=ends), pieces.ids)) == "a"
    assert text(run(pieces.channel(stop_ids=ends, include_stop=True), pieces.ids)) == "ab"


def test_an_included_stop_string_is_delivered_to_its_end_and_not_further() -> None:
    pieces = Pieces("one ", "ST", "OP now")
    deltas = run(pieces.channel(stops=("STOP",), include_stop=True), pieces.ids)
    assert text(deltas) == "one STOP"


def test_a_stop_string_may_end_inside_a_token_and_start_inside_another() -> None:
    pieces = Pieces("xxAB", "CDyy")
    deltas = run(pieces.channel(stops=("BC",)), pieces.ids)
    assert (text(deltas), deltas[-1].count) == ("xxA", 2)


def test_bytes_that_can_no_longer_become_a_character_are_replaced_where_that_is_certain() -> None:
    pieces = Pieces(b"\xf0\x9f", "a", b"\xe2\x82")
    assert [delta.text for delta in run(pieces.channel(), pieces.ids)] == ["\ufffda", "\ufffd"]


def test_a_special_token_ends_an_open_character() -> None:
    pieces = Pieces(b"\xf0\x9f", END, b"\x98\x80")
    assert text(run(pieces.channel(), pieces.ids)).startswith("\ufffd")


def test_min_tokens_keeps_stop_strings_from_ending_the_output_too_early() -> None:
    pieces = Pieces("a", "END", "b", "END", "c")
    deltas = run(pieces.channel(stops=("END",), min_tokens=3), pieces.ids)
    assert (text(deltas), deltas[-1].count) == ("aENDb", 4)


def test_tokens_ride_with_the_last_character_of_their_text() -> None:
    pieces = Pieces("ok", b"\xf0\x9f", b"\x98\x80", " S", "T", "x", END)
    channel = pieces.channel(stops=("STOP",), keep_tokens=True)
    given_probs = [TokenLogprobs(-float(i)) for i in pieces.ids]
    seen = []
    for token in pieces.ids:
        deltas = channel.push([token], [given_probs[token]])
        seen += [(delta.text, [sampled.token for sampled in delta.tokens]) for delta in deltas]
    assert seen == [("ok", [0]), ("😀", [1, 2]), (" ", []), ("STx", [3, 4, 5])]
    assert [last.tokens for last in channel.finish()] == [()]


def test_tokens_of_the_stop_string_are_not_delivered() -> None:
    pieces = Pieces("a", "bS", "TOP")
    deltas = run(pieces.channel(stops=("STOP",), keep_tokens=True), pieces.ids)
    assert text(deltas) == "ab"
    assert [sampled.token for delta in deltas for sampled in delta.tokens] == [0]


chunk = st.one_of(
    st.sampled_from(["a", "b", "é", "€", "😀"]).map(str.encode), st.binary(max_size=3)
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(chunk, st.just(END)), min_size=1, max_size=12),
    st.lists(st.sampled_from(["a", "ab", "b€", "<|im_end|>", "a<|im", "\ufffd"]), max_size=3),
    st.lists(st.integers(1, 5), max_size=12),
    st.integers(0, 6),
    st.booleans(),
)
def test_however_ids_are_grouped_the_output_is_the_same(
    vocabulary: list[bytes], stops: list[str], sizes: list[int], minimum: int, include: bool
) -> None:
    pieces = Pieces(*vocabulary)

    def outcome(groups: list[int]) -> tuple[str, list[int], str | None, int]:
        channel = pieces.channel(
            stops=tuple(stops), min_tokens=minimum, include_stop=include, keep_tokens=True
        )
        deltas = run(channel, pieces.ids, groups)
        tokens = [sampled.token for delta in deltas for sampled in delta.tokens]
        return text(deltas), tokens, deltas[-1].stop, deltas[-1].count

    one_by_one = outcome([])
    assert outcome(sizes) == one_by_one
    assert outcome([len(vocabulary)]) == one_by_one


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=4), max_size=10))
def test_without_stops_the_text_is_the_plain_decode_and_tokens_spell_it(parts: list[bytes]) -> None:
    pieces = Pieces(*parts, specials=())
    deltas = run(pieces.channel(keep_tokens=True), pieces.ids)
    assert text(deltas) == b"".join(parts).decode("utf-8", "replace")
    assert [sampled.token for delta in deltas for sampled in delta.tokens] == pieces.ids


WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', "{}", "}", "a", " ", "\n", "ST", "OP", "<", "😀")  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=14),
    st.lists(st.sampled_from(["STOP", "a", "<tool", "\n\n", "}"]), max_size=2),
    st.lists(st.integers(1, 5), max_size=14),
    st.integers(0, 6),
    st.booleans(),
)
def test_with_a_dialect_too_the_grouping_of_ids_does_not_matter(
    words: list[str], stops: list[str], sizes: list[int], minimum: int, include: bool
) -> None:
    pieces = Pieces(*words)

    def outcome(groups: list[int]) -> tuple[object, ...]:
        reader = Dialect("hermes", "think").reader(Reading({"now": Tool("now")}))
        detokenizer = Detokenizer(lambda token: pieces.bytes[token], pieces.special_ids)
        options = ChannelOptions(tuple(stops), frozenset(), minimum, include, True)
        channel = Channel(detokenizer, options, reader)
        deltas = run(channel, pieces.ids, groups)
        thoughts = "".join(delta.reasoning for delta in deltas)
        calls = [(d.call.order, d.call.name) for d in deltas if d.call and d.call.name]
        arguments = "".join(d.call.arguments for d in deltas if d.call)
        tokens = [sampled.token for delta in deltas for sampled in delta.tokens]
        stop = channel.stop and (channel.stop.stop, channel.stop.count)
        counts = channel.calls.complete, channel.calls.broken, channel.reasoning_count
        assert all(bool(d.text) + bool(d.reasoning) + bool(d.call) <= 1 for d in deltas)
        return text(deltas), thoughts, calls, arguments, tokens, stop, counts

    one_by_one = outcome([])
    assert outcome(sizes) == one_by_one
    assert outcome([len(words)]) == one_by_one


def test_white_space_before_markup_is_dropped_and_at_the_end_it_is_delivered() -> None:
    for words, content in (
        (("a", "\n", "\n", '<tool_call>{"name": "now"}</tool_call>', "\n"), "a"),
        (("a", " \n", "b", "\n", " "), "a \nb\n "),
    ):
        pieces = Pieces(*words)
        reader = Dialect("hermes").reader(Reading({"now": Tool("now")}))
        detokenizer = Detokenizer(lambda token, p=pieces: p.bytes[token], frozenset())  # type: ignore[misc]
        deltas = run(Channel(detokenizer, ChannelOptions(), reader), pieces.ids)
        assert text(deltas) == content


def test_a_stop_string_is_heard_in_white_space_that_waits() -> None:
    pieces = Pieces("a", "\n", "\n", "\n", "b")
    reader = Dialect("hermes").reader(Reading({"now": Tool("now")}))
    detokenizer = Detokenizer(lambda token: pieces.bytes[token], frozenset())
    channel = Channel(detokenizer, ChannelOptions(stops=("\n\n",)), reader)
    seen = [channel.push([token]) for token in pieces.ids[:3]]
    assert channel.stop is not None
    assert channel.stop.count == 3
    assert "".join(delta.text for deltas in seen for delta in deltas) == "a"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(chunk, st.just(END)), max_size=12), st.booleans(), st.integers(-1, 11))
def test_an_answer_of_which_nothing_is_asked_is_the_same_on_its_short_way(
    vocabulary: list[bytes], skip: bool, end: int
) -> None:
    pieces = Pieces(*vocabulary)
    ends = frozenset({end})
    short, long = (
        pieces.channel(skip_special=skip, stop_ids=ends, stops=stops)
        for stops in ((), ("no such text",))
    )
    ids = pieces.ids[: end + 1] if 0 <= end < len(vocabulary) else pieces.ids
    assert text(run(short, ids)) == text(run(long, ids))
    assert short.count == long.count
