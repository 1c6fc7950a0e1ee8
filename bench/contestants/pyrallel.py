"""pyrallel-consumer, key order, at the best settings found. It needs Python 3.12, so it has its own environment."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.contestants.lap import Lap, looped
from bench.kit import HERE, Ran
from bench.workload import Order

PACKAGES = ("pyrallel-consumer==1.0.0", "uvloop>=0.21", "-e", str(HERE.parent))  # the workload uses types of Onward
HOME = HERE.parent / ".services" / "pyrallel"
NEWER = "import sys; sys.exit(sys.version_info < (3, 12))"
INSTALL_S = 300.0
STUCK_S = 100.0
BEST = {"in_flight": 64, "queue": 1_000, "poll": 1_000, "strict": True}


def interpreter(say: Callable[[str], None]) -> str | None:
    """The Python of a virtual environment with pyrallel-consumer, created the first time. None: no Python 3.12."""
    python = HOME / "bin" / "python"
    if (HOME / ".ready").exists():
        return str(python)
    base = next(filter(_is_newer, _pythons()), None)
    if base is None:
        say("kafka: pyrallel-consumer is skipped: it needs Python 3.12 or newer, and none was found")
        return None
    say("kafka: installing pyrallel-consumer")
    for command in ([base, "-m", "venv", str(HOME)], [str(python), "-m", "pip", "install", "-q", *PACKAGES]):
        subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True)
    (HOME / ".ready").touch()
    return str(python)


def _pythons() -> Iterator[str]:
    yield sys.executable
    yield from filter(None, map(shutil.which, ("python3.12", "python3.13", "python3.14")))
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob("versions/3.1[2-9]*/bin/python")))


def _is_newer(python: str) -> bool:
    return subprocess.run([python, "-c", NEWER], capture_output=True).returncode == 0


def run(servers: str, topic: str, group: str, events: int, **tuning: Any) -> Ran:
    return looped(_run(_config(servers, group, BEST | tuning), topic, Lap(events)))


def _config(servers: str, group: str, tuning: dict[str, Any]) -> Any:
    from pyrallel_consumer.config import ExecutionConfig, KafkaConfig, ParallelConsumerConfig

    parallel = ParallelConsumerConfig(
        execution=ExecutionConfig(max_in_flight=tuning["in_flight"]),
        queue_max_messages=tuning["queue"],
        poll_batch_size=tuning["poll"],
        strict_completion_monitor_enabled=tuning["strict"],
        diag_log_every=1_000_000,
        message_cache_max_bytes=0,
    )
    return KafkaConfig(BOOTSTRAP_SERVERS=[servers], CONSUMER_GROUP=group, dlq_enabled=False, parallel_consumer=parallel)


async def _run(config: Any, topic: str, lap: Lap) -> Ran:
    import msgspec
    from pyrallel_consumer.consumer import PyrallelConsumer

    logging.disable(logging.CRITICAL)
    decode, over = msgspec.json.Decoder(Order).decode, asyncio.Event()

    async def handle(item: Any) -> None:
        order = decode(item.payload)
        if lap.saw(order.customer, order.number):
            over.set()

    consumer = PyrallelConsumer(config, handle, topic)
    await consumer.start()
    try:
        await asyncio.wait_for(over.wait(), STUCK_S)
    finally:
        await consumer.stop()
    return lap.ran()
