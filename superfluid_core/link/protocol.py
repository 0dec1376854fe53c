"""The asyncio face of a link: names of callbacks, nothing else."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast


class Callbacks(Protocol):
    """What a transport tells its link."""

    def on_connected(self, transport: asyncio.Transport) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_eof(self) -> None: ...

    def on_lost(self, error: BaseException | None) -> None: ...

    def on_writable(self, *, is_writable: bool) -> None: ...


class LinkProtocol(asyncio.Protocol):
    """What asyncio calls; everything is the link's business."""

    def __init__(self, link: Callbacks) -> None:
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link.on_connected(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self._link.on_data(data)

    def eof_received(self) -> bool:
        self._link.on_eof()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.on_lost(exc)

    def pause_writing(self) -> None:
        self._link.on_writable(is_writable=False)

    def resume_writing(self) -> None:
        self._link.on_writable(is_writable=True)
