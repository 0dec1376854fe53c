"""A picture as a list of rectangles, lines and words in pixels, from the top left. Writers turn it into a file."""

from __future__ import annotations

from dataclasses import dataclass, field

INK = "#1f2933"
PALE = "#d5dbe1"
PAPER = "#ffffff"
DECODE = "#2f6fb0"
PROMPT = "#e08a2b"
POOL = "#4b9a61"
QUEUE = "#b5475c"


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Filled, without a border."""

    x: float
    y: float
    width: float
    height: float
    color: str


@dataclass(frozen=True, slots=True)
class Line:
    """One pixel wide; two where `is_bold`."""

    x1: float
    y1: float
    x2: float
    y2: float
    color: str
    is_bold: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """Text whose baseline starts, or ends where `is_right`, at x, y."""

    x: float
    y: float
    text: str
    color: str = INK
    is_right: bool = False
    is_bold: bool = False


Shape = Rectangle | Line | Words


@dataclass(slots=True)
class Picture:
    """Shapes in the order in which they are painted."""

    width: int
    height: int
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        self.shapes.extend(shapes)
