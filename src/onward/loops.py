"""The event loops that Onward starts itself."""

import asyncio


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's if it is installed: it does the same with less CPU time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
