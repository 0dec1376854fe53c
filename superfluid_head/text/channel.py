"""Joins the parts of the way back: ids in, deltas out, and the token at which a stop string ended the output.

Owns one choice. Un-skipped text goes to the dialect's reader, which tells content from reasoning and calls; content goes to
the stop strings, un-skipped too, and is delivered skipped. Every token rides with its text (http_api S13): it leaves in the
delta that holds the last of its characters. Nothing here knows HTTP or nodes.

    ids -> detokenizer -> reader -> content -> stop strings -> delta
                                 -> reasoning, calls --------> delta
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from superfluid_core.session import TokenLogprobs
from superfluid_head.text.delta import CallPart, Delta, DeltaBuilder, HiddenSpans, Mark, Sampled
from superfluid_head.text.detokenizer import Detokenizer, Piece
from superfluid_head.text.dialects.events import (
    CallEnd,
    CallStart,
    CallText,
    Content,
    Event,
    Reader,
    Reasoning,
)
from superfluid_head.text.stops import Match, StopMatcher

__all__ = ["CallPart", "Channel", "ChannelOptions", "Delta", "Sampled"]

EVERYTHING = 1 << 62


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """What a request asked of its text. `stop_ids` is the complete set of ids that end the session.

    `marker_ids` are the tokens that are markup of the model's dialect by themselves. With the end of the `calls_max`-th call the
    output ends.
    """

    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    include_stop: bool = False
    keep_tokens: bool = False
    marker_ids: frozenset[int] = frozenset()
    calls_max: int | None = None


@dataclass(slots=True)
class CallCount:
    """How many calls were begun, and how they ended."""

    begun: int = 0
    complete: int = 0
    broken: int = 0


class _Stretch:
    """Content between two pieces of markup: what of it the stop strings have not released yet."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.matcher = StopMatcher(stops)
        self._queue: deque[tuple[int, str]] = deque()
        self._released = 0
        self._runs: deque[tuple[int, int]] = deque()
        self._length = 0

    def push(self, start: int, text: str, floor: int) -> Match | None:
        """Take text at raw position `start`; a match that ends at or before `floor` does not count."""
        self._queue.append((start, text))
        if not self._runs or self._runs[-1][1] - self._runs[-1][0] != start - self._length:
            self._runs.append((self._length, start))
        self._length += len(text)
        below = max(0, min(len(text), floor - start))
        match = self.matcher.push(text[:below], armed=False) if below else None
        return match or (self.matcher.push(text[below:]) if below < len(text) else None)

    def released(self, position: int) -> Iterable[tuple[int, str]]:
        """Yield what lies before `position` and was not yielded yet, with raw positions."""
        while self._released < position:
            start, text = self._queue.popleft()
            room = position - self._released
            if len(text) > room:
                self._queue.appendleft((start + room, text[room:]))
                text = text[:room]
            self._released += len(text)
            yield start, text

    def raw(self, position: int) -> int:
        """Return the raw position of the end of the character before `position`."""
        at = max(run for run in self._runs if run[0] < position)
        return at[1] + position - at[0]


class Channel:
    """The text of one choice. `push` and `finish` mutate it; after a Delta with `stop` both return nothing more."""

    def __init__(
        self, detokenizer: Detokenizer, options: ChannelOptions, reader: Reader | None = None
    ) -> None:
        self._detokenizer = detokenizer
        self._options = options
        self._reader = reader
        self._stretch: _Stretch | None = None
        self._ending_ids = frozenset() if options.include_stop else options.stop_ids
        self.is_bare = reader is None and not options.stops and not options.keep_tokens
        """Whether nothing is matched, read or kept: then `read` may be called instead of `push`."""
        self._builder = DeltaBuilder(self._drain, trims=reader is not None)
        self._hidden = HiddenSpans()
        self._marks: deque[Mark] = deque()
        self._ends: deque[int] = deque()
        self._known = 0
        self._floor = 0
        self._stop_end = 0
        self._is_told = False
        self.stop: Delta | None = None
        self.count = 0
        self.reasoning_count = 0
        self.calls = CallCount()

    @property
    def is_stopped(self) -> bool:
        return self.stop is not None

    def push(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> tuple[Delta, ...]:
        """Take ids in order; returns the deltas that they made certain, none while text is held back."""
        if self.is_bare:
            text = self.read(ids)
            return (Delta(text),) if text else ()
        for token, measured in zip(ids, logprobs or repeat(None), strict=False):
            if self.is_stopped:
                break
            self._take(token, measured)
        return self._made()

    def finish(self) -> tuple[Delta, ...]:
        """End the session: open characters and held text come out, a match that waited stands."""
        pieces = self._detokenizer.finish()
        self._known += sum(len(piece.text) for piece in pieces)
        self._hear(self._read(pieces))
        if self._reader is not None:
            self._hear(self._reader.finish())
        self._end_stretch()
        if self.is_stopped:
            return self._made()
        self._builder.settle()
        made = self._made() or (Delta(),)
        rest = self._builder.rest() + self._drain(EVERYTHING)
        return (*made[:-1], replace(made[-1], tokens=made[-1].tokens + rest))

    def read(self, ids: Sequence[int]) -> str:
        """Decode ids of a bare channel: all that there is to do. Most answers come this way."""
        detokenizer, ends = self._detokenizer, self._ending_ids
        self.count += len(ids)
        if len(ids) == 1 and ids[0] not in ends and ids[0] not in detokenizer.special_ids:
            text = detokenizer.decode(ids[0])
            self._known += len(text)
            return text
        shown: list[str] = []
        for token in ids:
            if token not in ends and token not in detokenizer.special_ids:
                text = detokenizer.decode(token)
                self._known += len(text)
                shown.append(text)
                continue
            pieces = detokenizer.finish() if token in ends else detokenizer.push(token)
            for piece in pieces:
                self._known += len(piece.text)
                if piece.is_shown:
                    shown.append(piece.text)
        return "".join(shown)

    def _take(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Decode one id, keep its mark, and pass its text on."""
        options = self._options
        self.count += 1
        ends = token in options.stop_ids and not options.include_stop
        pieces = self._detokenizer.finish() if ends else self._detokenizer.push(token)
        self._known += sum(len(piece.text) for piece in pieces)
        end = self._known + (1 if self._detokenizer.is_open else 0)
        if self.count < options.min_tokens:
            self._floor = self._known
        if options.stops or options.keep_tokens:
            is_shown = not ends and self._detokenizer.shows(token)
            self._marks.append(
                Mark(Sampled(token, logprobs), self.count, self._known, end, is_shown)
            )
        if self._reader is not None:
            self._ends.append(end)
        self._hear(self._read(pieces, is_marker=token in options.marker_ids and not ends))

    def _read(self, pieces: tuple[Piece, ...], *, is_marker: bool = False) -> list[Event]:
        """Note what is hidden and have the reader tell what the text is."""
        if not pieces or self.is_stopped:
            return []
        start = at = self._known - sum(len(piece.text) for piece in pieces)
        for piece in pieces:
            if not piece.is_shown:
                self._hidden.add(at, at + len(piece.text))
            at += len(piece.text)
        text = "".join(piece.text for piece in pieces)
        if self._reader is None:
            return [Content(start, text)]
        if not is_marker:
            return self._reader.feed(text)
        lead = text[: -len(pieces[-1].text)]
        events = self._reader.feed(lead) if lead else []
        return events + self._reader.feed(pieces[-1].text, is_single=True)

    def _hear(self, events: Iterable[Event]) -> None:
        """Turn what the reader said into deltas, up to a stop string."""
        for event in events:
            if not isinstance(event, Content):
                self._end_stretch()
            if self.is_stopped:
                return
            match event:
                case Content():
                    self._content(event)
                case Reasoning():
                    self._reasoning(event)
                case CallStart() | CallText() | CallEnd():
                    self._call(event)

    def _content(self, content: Content) -> None:
        if self._stretch is None:
            self._stretch = _Stretch(self._options.stops)
        match = self._stretch.push(content.start, content.text, self._floor)
        if match is not None:
            self._on_match(self._stretch, match)
        else:
            self._release(self._stretch, self._stretch.matcher.released)

    def _release(self, stretch: _Stretch, position: int) -> None:
        for start, text in stretch.released(position):
            self._builder.text(self._hidden.without(start, text), start + len(text))

    def _end_stretch(self) -> None:
        """No more content follows directly: a match that waited stands, everything else is released."""
        stretch, self._stretch = self._stretch, None
        if stretch is None or self.is_stopped:
            return
        match = stretch.matcher.finish()
        if match is not None:
            self._on_match(stretch, match)
        else:
            self._release(stretch, stretch.matcher.released)

    def _reasoning(self, event: Reasoning) -> None:
        end = event.start + len(event.text)
        while self._ends and self._ends[0] <= end:
            self.reasoning_count += self._ends.popleft() > event.start
        self._builder.text(self._hidden.without(event.start, event.text), end, is_reasoning=True)

    def _call(self, event: CallStart | CallText | CallEnd) -> None:
        match event:
            case CallStart():
                self._builder.call(CallPart(self.calls.begun, event.name, event.id), event.end)
                self.calls.begun += 1
            case CallText():
                part = CallPart(self.calls.begun - 1, arguments=event.text)
                self._builder.call(part, event.end)
            case CallEnd():
                self.calls.complete += event.is_complete
                self.calls.broken += not event.is_complete
                if event.is_complete:
                    self._judge_calls()

    def _judge_calls(self) -> None:
        """End the output with the last call that is wanted: its tokens are all that there are by now."""
        if self.calls.begun != self._options.calls_max or self.count < self._options.min_tokens:
            return
        self._stop_end = EVERYTHING
        self.stop = Delta(count=self.count)

    def _on_match(self, stretch: _Stretch, match: Match) -> None:
        """Deliver what stands before a match and name the token that completed it."""
        self._release(stretch, match.start)
        self._builder.settle()
        self._stop_end = end = stretch.raw(match.end)
        ending = (mark.ordinal for mark in self._marks if mark.known >= end)
        stop = self._options.stops[match.order]
        self.stop = Delta(stop=stop, count=next(ending, self.count))

    def _made(self) -> tuple[Delta, ...]:
        """Return the deltas of this step; the last one says so if a stop string ended the output."""
        made = self._builder.take()
        stop = self.stop
        if stop is None or self._is_told:
            return made
        self._is_told = True
        stop = replace(stop, tokens=self._builder.rest())
        if self._options.include_stop or self._stop_end == EVERYTHING:
            tokens = stop.tokens + self._drain(self._stop_end)
            stop = replace(stop, text=stop.stop or "", tokens=tokens)
        if made and made[-1].call is None and not made[-1].reasoning:
            last = made[-1]
            text, tokens = last.text + stop.text, last.tokens + stop.tokens
            return (*made[:-1], replace(stop, text=text, tokens=tokens))
        return (*made, stop)

    def _drain(self, end: int) -> tuple[Sampled, ...]:
        """Hand over the tokens whose text ends at or before `end`."""
        marks = self._marks
        drained: list[Sampled] = []
        while marks and marks[0].end <= end:
            mark = marks.popleft()
            if mark.is_shown and self._options.keep_tokens:
                drained.append(mark.sampled)
        return tuple(drained)
