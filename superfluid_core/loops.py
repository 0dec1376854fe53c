"""Which event loop the programs run on.

uvloop, where it is installed: a turn, a write and a record of TLS cost it half of what they cost the standard library, and a node's step
for one stream is little else. Knows nothing of what runs on it; whoever starts a program asks.
"""

from __future__ import annotations

import asyncio


def new_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop: uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made
