"""One HTML file with everything in it: pictures as inline SVG, tables as text. It loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from superfluid_core.simulator.plot.shapes import Line, Picture, Rectangle, Shape, Words

_STYLE = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:2em auto;max-width:1000px;color:#1f2933}"
    "pre{overflow-x:auto;background:#f4f6f8;padding:1em}svg{max-width:100%;height:auto}"
)


def svg(picture: Picture) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width}" height="{picture.height}" '
        f'viewBox="0 0 {picture.width} {picture.height}" font-family="sans-serif" font-size="12">'
    )
    return head + "".join(_shape(each) for each in picture.shapes) + "</svg>"


def _shape(shape: Shape) -> str:
    match shape:
        case Rectangle():
            return (
                f'<rect x="{shape.x:g}" y="{shape.y:.1f}" width="{shape.width:.1f}" '
                f'height="{shape.height:.1f}" fill="{shape.color}"/>'
            )
        case Line():
            return (
                f'<line x1="{shape.x1:g}" y1="{shape.y1:.1f}" x2="{shape.x2:g}" y2="{shape.y2:.1f}" '
                f'stroke="{shape.color}" stroke-width="{2 if shape.is_bold else 1}"/>'
            )
        case Words():
            anchor = ' text-anchor="end"' if shape.is_right else ""
            weight = ' font-weight="bold"' if shape.is_bold else ""
            return (
                f'<text x="{shape.x:g}" y="{shape.y:.1f}" fill="{shape.color}"{anchor}{weight}>'
                f"{escape(shape.text)}</text>"
            )


def page(title: str, pictures: Iterable[Picture], text: str) -> str:
    """Put pictures and a report on one page."""
    drawn = "\n".join(svg(each) for each in pictures)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{drawn}\n"
        f"<pre>{escape(text)}</pre></body></html>\n"
    )
