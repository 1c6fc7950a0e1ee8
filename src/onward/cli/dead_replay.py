"""Runs a replay with a progress bar on a terminal. Ctrl-C stops it between two steps."""

import asyncio
import threading

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from onward.failure.dead import Replay, Replayed
from onward.signals import STOP_SIGNALS


async def run(replay: Replay) -> Replayed:
    console = Console(stderr=True)
    columns = (TextColumn("replayed"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    loop = asyncio.get_running_loop()
    caught = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("replayed", total=None)

        def stop() -> None:
            replay.stop()
            for number in caught:  # a second signal has its default effect
                loop.remove_signal_handler(number)

        for number in caught:
            loop.add_signal_handler(number, stop)
        try:
            return await replay.run(
                lambda replay: bar.update(task, total=replay.total, completed=replay.replayed + replay.failed)
            )
        finally:
            for number in caught:
                loop.remove_signal_handler(number)
