"""Joins the parts of the way back: ids in, text deltas out, and the token at which a stop string ended the output.

Owns one choice. Text is matched un-skipped and delivered skipped; every token rides with its text (http_api S13): it
leaves in the delta that holds the last of its characters. Nothing here knows HTTP or nodes; reasoning and tool
channels will sit between the release of text and the delta.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from superfluid_core.session import TokenLogprobs
from superfluid_head.text.detokenizer import Detokenizer, Piece
from superfluid_head.text.stops import Match, StopMatcher


class Sampled(NamedTuple):
    """An id whose text is in a delta, with its log-probabilities when asked for."""

    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Delta:
    """What may be sent now. `stop` names the stop string that ended the output, `count` the ids up to it."""

    text: str = ""
    tokens: tuple[Sampled, ...] = ()
    stop: str | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """What a request asked of its text. `stop_ids` is the complete set of ids that end the session."""

    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    include_stop: bool = False
    keep_tokens: bool = False


class _Mark(NamedTuple):
    """A token in flight: `known` characters existed after it, `end` are needed for it to be delivered."""

    sampled: Sampled
    ordinal: int
    known: int
    end: int
    is_shown: bool


@dataclass(slots=True)
class _Held:
    """Un-skipped text that is not delivered yet, and its tokens."""

    pieces: deque[Piece] = field(default_factory=deque)
    marks: deque[_Mark] = field(default_factory=deque)
    tokens: list[Sampled] = field(default_factory=list)
    delivered: int = 0


class Channel:
    """The text of one choice. `push` and `finish` mutate it; after a Delta with `stop` both return nothing more."""

    def __init__(self, detokenizer: Detokenizer, options: ChannelOptions) -> None:
        self._detokenizer = detokenizer
        self._options = options
        self._matcher = StopMatcher(options.stops)
        self._held = _Held()
        self._known = 0
        self.count = 0
        self.is_stopped = False

    def push(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> Delta | None:
        """Take ids in order; returns the delta that they made certain, None while text is held back."""
        shown: list[str] = []
        for at, token in enumerate(ids):
            if self.is_stopped:
                break
            match = self._take(token, logprobs[at] if logprobs else None)
            if match is not None:
                return self._stop(match, shown)
            self._deliver(self._matcher.released, shown)
        return self._delta(shown)

    def finish(self) -> Delta | None:
        """End the session: open characters and held text come out, a match that waited stands."""
        if self.is_stopped:
            return None
        shown: list[str] = []
        match = self._feed(self._detokenizer.finish()) or self._matcher.finish()
        if match is not None:
            return self._stop(match, shown)
        self._deliver(self._matcher.released, shown)
        return self._delta(shown, is_last=True)

    def _take(self, token: int, logprobs: TokenLogprobs | None) -> Match | None:
        """Decode one id and match its text; keeps its mark."""
        self.count += 1
        ends = token in self._options.stop_ids and not self._options.include_stop
        pieces = self._detokenizer.finish() if ends else self._detokenizer.push(token)
        match = self._feed(pieces)
        end = self._known + (1 if self._detokenizer.is_open else 0)
        is_shown = not ends and self._detokenizer.shows(token)
        if self._options.stops or self._options.keep_tokens:
            mark = _Mark(Sampled(token, logprobs), self.count, self._known, end, is_shown)
            self._held.marks.append(mark)
        return match

    def _feed(self, pieces: tuple[Piece, ...]) -> Match | None:
        """Give new text to the matcher, as one push: the cut into pieces must not matter."""
        if not pieces:
            return None
        self._held.pieces.extend(pieces)
        text = "".join(piece.text for piece in pieces)
        self._known += len(text)
        return self._matcher.push(text, armed=self.count >= self._options.min_tokens)

    def _deliver(self, released: int, shown: list[str]) -> None:
        """Move text and tokens up to the character `released` out of the held part."""
        held = self._held
        while held.delivered < released:
            piece = held.pieces.popleft()
            room = released - held.delivered
            if len(piece.text) > room:
                held.pieces.appendleft(Piece(piece.text[room:], piece.is_shown))
                piece = Piece(piece.text[:room], piece.is_shown)
            held.delivered += len(piece.text)
            if piece.is_shown:
                shown.append(piece.text)
        while held.marks and held.marks[0].end <= released:
            mark = held.marks.popleft()
            if mark.is_shown and self._options.keep_tokens:
                held.tokens.append(mark.sampled)

    def _stop(self, match: Match, shown: list[str]) -> Delta:
        """Deliver what stands before a match and name the token that completed it."""
        self.is_stopped = True
        ending = (mark.ordinal for mark in self._held.marks if mark.known >= match.end)
        count = next(ending, self.count)
        self._deliver(match.start, shown)
        stop = self._options.stops[match.order]
        if self._options.include_stop:
            shown.append(stop)
            self._deliver(match.end, [])
        return Delta("".join(shown), self._drain_tokens(), stop, count)

    def _delta(self, shown: list[str], *, is_last: bool = False) -> Delta | None:
        """Tokens wait for text: an empty delta is never sent before the end."""
        text = "".join(shown)
        if not text and not is_last:
            return None
        return Delta(text, self._drain_tokens())

    def _drain_tokens(self) -> tuple[Sampled, ...]:
        tokens, self._held.tokens = tuple(self._held.tokens), []
        return tokens
