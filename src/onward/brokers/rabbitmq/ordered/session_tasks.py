"""The tasks of a member: one for its connection, within that one for each seat, and others beside them."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any

log = logging.getLogger("onward")

Work = Coroutine[Any, Any, None]


class SessionTasks:
    def __init__(self) -> None:
        self._main: asyncio.Task[None] | None = None
        self._kept: dict[Hashable, asyncio.Task[None]] = {}
        self._beside: set[asyncio.Task[None]] = set()

    def start(self, main: Work) -> None:
        self._main = asyncio.create_task(_logged(main))

    def keep(self, name: Hashable, work: Callable[[], Work]) -> None:
        """Start this work again if it has ended."""
        task = self._kept.get(name)
        if task is None or task.done():
            self._kept[name] = asyncio.create_task(_logged(work()))

    def beside(self, work: Work) -> None:
        """Run it, and wait for it only at the end."""
        task = asyncio.create_task(_logged(work))
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def stop(self, stopped: Iterable[Hashable]) -> None:
        """Cancel what is kept under these names."""
        for name in stopped:
            if name in self._kept:
                self._kept[name].cancel()

    async def end_session(self) -> None:
        """Cancel everything but the main task."""
        tasks = [*self._kept.values(), *self._beside]
        self._kept.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        if self._main is not None:
            self._main.cancel()
            await asyncio.wait([self._main])


async def _logged(work: Work) -> None:
    try:
        await work
    except Exception:
        log.exception("RabbitMQ: a task of a group member failed")
