"""How models mark their reasoning, and whether a prompt has already begun it.

Only a block at the very start of the answer is reasoning (http_api Q5); the same tags later are text. Where the template
wrote the opening tag into the prompt, the answer starts inside the block; where it wrote an empty closed block, the answer
starts after it (Q3). White space next to the tags belongs to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from superfluid_head.text.dialects.events import Voice
from superfluid_head.text.dialects.shape import NOTHING, Free, Literal, Marker, Row, Shape, optional
from superfluid_head.text.dialects.tape import Steps


class Opening(Enum):
    """Where an answer starts: before any reasoning, inside it, or behind it."""

    FRESH = "fresh"
    INSIDE = "inside"
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class Tags:
    """A family's tags; the first opening is the one that its models write."""

    opens: tuple[str, ...]
    close: str
    after: str = "\n\n"

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, self.close)

    def opening(self, tail: str) -> Opening:
        """Judge by the end of the rendered prompt."""
        bare = tail.rstrip()
        if bare.endswith(self.close):
            return Opening.BEHIND
        return Opening.INSIDE if bare.endswith(self.opens) else Opening.FRESH

    def continued(self, text: str) -> Opening:
        """Judge by the text of a message that is being continued."""
        begun = max(text.rfind(tag) for tag in self.opens)
        return Opening.INSIDE if begun > text.rfind(self.close) else Opening.BEHIND

    def read(self, voice: Voice, opening: Opening) -> Steps[None]:
        """Read the block, if there is one; returns where content begins."""
        if opening is Opening.BEHIND:
            return
        tape = voice.tape
        if opening is Opening.FRESH:
            tape.keep()
            yield from tape.space()
            if (yield from tape.starts(*self.opens)) is None:
                start, text = tape.kept()
                if text:
                    voice.content(start, text)
                return
            tape.forget()
        yield from tape.space()
        if (yield from tape.flow((self.close,), voice.reasoning)) is not None:
            yield from tape.space()

    def before_content(self, opening: Opening) -> Shape:
        """Describe what a constrained answer may have before its content."""
        rest = Row((Free(self.close), Marker(self.close), Literal(self.after)))
        if opening is Opening.BEHIND:
            return NOTHING
        if opening is Opening.INSIDE:
            return rest
        return optional(Row((Marker(self.opens[0]), rest)))


TAGS: dict[str, Tags] = {
    "think": Tags(("<think>",), "</think>"),
    "magistral": Tags(("[THINK]",), "[/THINK]", ""),
    "seed_oss": Tags(("<seed:think>",), "</seed:think>", ""),
    "granite": Tags(
        ("Here is my thought process:", "Here's my thought process:"), "Here is my response:", " "
    ),
    "gemma4": Tags(("<|channel>thought",), "<channel|>", ""),
}
