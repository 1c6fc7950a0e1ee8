"""Handlers with a known duration, for worker processes to import."""

import asyncio
import time


def plain(order: dict[str, float]) -> None:
    time.sleep(order["takes_s"])
    if order.get("fails"):
        raise ValueError("after its nap")


async def suspending(order: dict[str, float]) -> None:
    await asyncio.sleep(order["takes_s"])
    if order.get("fails"):
        raise ValueError("after its nap")
