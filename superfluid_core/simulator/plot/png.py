"""Paints pictures into a PNG file with nothing but zlib: 24-bit pixels, no smoothing, small capitals for words."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from superfluid_core.simulator.plot.glyphs import HEIGHT, WIDTH, glyph
from superfluid_core.simulator.plot.shapes import Line, Picture, Rectangle, Words

SIGNATURE = b"\x89PNG\r\n\x1a\n"
SCALE = 2


def _rgb(color: str) -> bytes:
    return bytes.fromhex(color[1:])


class Canvas:
    """Pixels, row after row, white at first. What falls outside is cut."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._pixels = bytearray(b"\xff" * (3 * width * height))

    def fill(self, x: int, y: int, width: int, height: int, color: bytes) -> None:
        left, right = max(0, x), min(self.width, x + width)
        if right <= left:
            return
        row = color * (right - left)
        for line in range(max(0, y), min(self.height, y + height)):
            start = 3 * (line * self.width + left)
            self._pixels[start : start + len(row)] = row

    def pixel(self, x: int, y: int) -> bytes:
        start = 3 * (y * self.width + x)
        return bytes(self._pixels[start : start + 3])

    def line(self, shape: Line, top: int) -> None:
        """Walk along the longer side."""
        thick = 2 if shape.is_bold else 1
        color = _rgb(shape.color)
        across, down = shape.x2 - shape.x1, shape.y2 - shape.y1
        steps = max(1, round(max(abs(across), abs(down))))
        if not down:
            self.fill(round(shape.x1), top + round(shape.y1), round(across) + 1, thick, color)
            return
        for step in range(steps + 1):
            x = round(shape.x1 + across * step / steps)
            y = round(shape.y1 + down * step / steps)
            self.fill(x, top + y, thick, thick, color)

    def words(self, shape: Words, top: int) -> None:
        advance = (WIDTH + 1) * SCALE
        x = round(shape.x) - (len(shape.text) * advance if shape.is_right else 0)
        y = top + round(shape.y) - HEIGHT * SCALE
        color = _rgb(shape.color)
        for letter in shape.text:
            for row, dots in enumerate(glyph(letter)):
                for column in range(WIDTH):
                    if dots >> (WIDTH - 1 - column) & 1:
                        place = x + column * SCALE
                        self.fill(place, y + row * SCALE, SCALE, SCALE, color)
            x += advance

    def encode(self) -> bytes:
        """Make the file: header, one compressed stream of rows, end."""
        size = 3 * self.width
        rows = b"".join(
            b"\x00" + self._pixels[line * size : (line + 1) * size] for line in range(self.height)
        )
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
        return SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def png(pictures: Sequence[Picture]) -> bytes:
    """Paint pictures one below the other."""
    width = max((each.width for each in pictures), default=1)
    canvas = Canvas(width, max(1, sum(each.height for each in pictures)))
    top = 0
    for picture in pictures:
        for shape in picture.shapes:
            match shape:
                case Rectangle():
                    x, y = round(shape.x), top + round(shape.y)
                    bottom = top + round(shape.y + shape.height)
                    canvas.fill(
                        x, y, max(1, round(shape.width)), max(1, bottom - y), _rgb(shape.color)
                    )
                case Line():
                    canvas.line(shape, top)
                case Words():
                    canvas.words(shape, top)
        top += picture.height
    return canvas.encode()
