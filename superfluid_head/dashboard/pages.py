"""Hands out the dashboard's files: a fixed list, read once, the same for everybody and open without a key (decisions 27).

Owns the paths, the types and what a browser is told about such a page: no script, style or connection but this head's own, no
inline code, no frame around it, no guessing of types, no markup made from text (Trusted Types). The files hold no data: their
scripts ask the admin routes with a key that a person types in. It must not know the fleet.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from superfluid_head.api.errors import not_found

FOLDER = Path(__file__).with_name("static")
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Page:
    """One file as it is sent."""

    data: bytes
    media_type: str
    tag: str


def _read() -> dict[str, Page]:
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            data = path.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            found[path.name] = Page(data, TYPES[path.suffix], tag)
    return found


FILES = _read()
PATHS = frozenset({"/", "/dashboard", *(f"/dashboard/{name}" for name in FILES)})
"""What is open without a key; nothing else below these paths is."""


class DashboardEndpoint:
    """The routes' handlers."""

    async def index(self, request: Request) -> Response:
        """Show the dashboard."""
        return _reply(request, FILES[INDEX])

    async def file(self, request: Request) -> Response:
        """Give a file of the dashboard."""
        page = FILES.get(request.path_params["file"])
        if page is None:
            raise not_found()
        return _reply(request, page)


def _reply(request: Request, page: Page) -> Response:
    headers = {**HEADERS, "etag": page.tag}
    known = request.headers.get("if-none-match", "")
    if page.tag in (each.strip().removeprefix("W/") for each in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(page.data, media_type=page.media_type, headers=headers)
