"""Plots: one file each, nothing loaded from elsewhere, and pixels that say what they should."""

from __future__ import annotations

import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.simulator.plot.chart import draw_bars, draw_run
from superfluid_core.simulator.plot.files import check_plot_path, pictures_of, write_plot
from superfluid_core.simulator.plot.glyphs import GLYPHS, glyph
from superfluid_core.simulator.plot.html import page, svg
from superfluid_core.simulator.plot.png import SIGNATURE, Canvas, png
from superfluid_core.simulator.plot.shapes import DECODE, PROMPT, Picture, Rectangle, Words
from superfluid_core.simulator.records import RunResult
from superfluid_core.simulator.run import run_scenario
from superfluid_core.simulator.scenarios import find_scenario


def _results() -> list[RunResult]:
    return list(run_scenario(find_scenario("chunked-prefill")).values())


class _Image(NamedTuple):
    width: int
    height: int
    rows: list[bytes]


def _decode(data: bytes) -> _Image:
    """Read back what `png` writes, checking every chunk."""
    assert data.startswith(SIGNATURE)
    place, body, size = len(SIGNATURE), b"", (0, 0)
    while place < len(data):
        (length,) = struct.unpack_from(">I", data, place)
        kind, chunk = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        (check,) = struct.unpack_from(">I", data, place + 8 + length)
        assert check == zlib.crc32(kind + chunk)
        if kind == b"IHDR":
            size = struct.unpack_from(">II", chunk)
        if kind == b"IDAT":
            body += chunk
        place += 12 + length
    raw = zlib.decompress(body)
    line = 1 + 3 * size[0]
    assert len(raw) == line * size[1]
    rows = [raw[n * line : (n + 1) * line] for n in range(size[1])]
    assert all(row[0] == 0 for row in rows)
    return _Image(*size, [row[1:] for row in rows])


def test_a_png_holds_the_colours_of_both_kinds_of_tokens() -> None:
    image = _decode(png([draw_run(_results()[0], "units")]))
    pixels = {row[3 * x : 3 * x + 3].hex() for row in image.rows for x in range(image.width)}
    assert {DECODE[1:], PROMPT[1:]} <= pixels


def test_a_rectangle_lies_where_it_was_put() -> None:
    picture = Picture(20, 10, [Rectangle(5, 2, 3, 4, "#ff0000")])
    image = _decode(png([picture]))
    red = {
        (x, y)
        for y in range(10)
        for x in range(20)
        if image.rows[y][3 * x : 3 * x + 3] == b"\xff\0\0"
    }
    assert red == {(x, y) for x in (5, 6, 7) for y in (2, 3, 4, 5)}


def test_what_lies_outside_is_cut() -> None:
    canvas = Canvas(4, 4)
    canvas.fill(-10, -10, 100, 100, b"\0\0\0")
    canvas.fill(9, 9, 5, 5, b"\1\1\1")
    assert {canvas.pixel(x, y) for x in range(4) for y in range(4)} == {b"\0\0\0"}


def test_every_glyph_is_like_no_other() -> None:
    assert len(set(GLYPHS.values())) == len(GLYPHS)
    assert glyph(" ") == (0,) * 5
    assert glyph("\u20ac") == glyph("\u2603")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_page_loads_nothing_and_escapes_what_it_shows() -> None:
    pictures = [*pictures_of(_results(), "units"), Picture(9, 9, [Words(1, 1, "<b>&")])]
    text = page("<title>", pictures, "<script>alert(1)</script>")
    tags = _Tags()
    tags.feed(text)
    names = {name for name, _ in tags.found}
    assert names <= {
        "html", "head", "meta", "title", "style", "body", "h1", "pre", "svg", "rect", "line", "text",
    }  # fmt: skip
    assert not any({"src", "href", "onload"} & set(attributes) for _, attributes in tags.found)
    assert "url(" not in text
    assert "@import" not in text


def test_an_svg_is_well_formed() -> None:
    from xml.etree import ElementTree as Tree

    for picture in (*pictures_of(_results(), "units"), draw_bars("none", [])):
        root = Tree.fromstring(svg(picture))
        assert root.tag.endswith("svg")


@pytest.mark.parametrize("name", ["a.pdf", "a", "/does/not/exist/a.png"])
def test_a_name_that_cannot_be_a_plot_is_refused_before_the_run(name: str) -> None:
    with pytest.raises(ConfigError):
        check_plot_path(name)


def test_the_ending_says_what_is_written(tmp_path: Path) -> None:
    pictures = [Picture(9, 9)]
    for ending, start in ((".png", SIGNATURE), (".html", b"<!doctype html>")):
        path = tmp_path / f"plot{ending}"
        check_plot_path(str(path))
        write_plot(str(path), "title", pictures, "text")
        assert path.read_bytes().startswith(start)
