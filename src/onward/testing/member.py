"""A member in its own process, which a scenario can suspend and kill: `python -m onward.testing.member TASK`.

TASK is JSON; its `mode` is one of:

- `hold` receives and settles nothing.
- `watch` receives `count` events. After each suspension it reports whether `sure_until` was in the future at any time
  during the next second.
- `work` writes each event to the effects file and settles it.
- `flood` publishes as fast as it can.
- `aside` sets its events aside one by one, then removes their records one by one.

It reports each step as a line of JSON on stdout, and exits when its stdin closes.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Broker, Revoked, State, Supervised, record_id
from onward.clock import now
from onward.event import Delivery
from onward.testing.aside import make_record
from onward.testing.scenario import Member, event


def report(step: str, **more: Any) -> None:
    print(json.dumps({"report": step, **more}), flush=True)  # noqa: T201


async def hold(broker: Broker, task: dict[str, Any]) -> None:
    supervised = Supervised(task["slot"], task["member"]) if "slot" in task else None
    member = await Member.join(
        broker,
        task["topic"],
        task["group"],
        yields=False,
        ordering=task.get("ordering", "key"),
        supervised=supervised,
    )
    report("joined")
    while True:
        for message in await member.receive(limit=task.get("limit", 1000), wait_s=60.0):
            sure_until = member.subscription.sure_until()
            report(type(message).__name__, sure=now() < sure_until, sure_until=sure_until)


async def watch(broker: Broker, task: dict[str, Any]) -> None:
    member = await Member.join(broker, task["topic"], task["group"], yields=False)
    await member.take(task["count"])
    await asyncio.to_thread(_watch, member.subscription.sure_until, task["settings"]["lease_s"] / 4)


def _watch(sure_until: Callable[[], float], stopped_s: float) -> None:
    seen = woke = now()
    report("holding")
    slept_s, sure = 0.0, False
    while True:
        before, seen = seen, now()
        if seen - before > max(stopped_s, slept_s):
            woke, slept_s, sure = seen, seen - before, False
        sure |= seen < sure_until()
        if slept_s and seen > woke + 1.0:
            report("awake", slept_s=slept_s, sure=sure)
            slept_s = 0.0
        time.sleep(0.0002)


async def work(broker: Broker, task: dict[str, Any]) -> None:
    """Handle events in order. When ownership is no longer certain, leave the group and join again."""
    effects = os.open(task["effects"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    while True:
        member = await Member.join(
            broker, task["topic"], task["group"], yields=False, ordering=task.get("ordering", "key")
        )
        report("joined")
        while await handle_once(member, effects, task.get("limit", 50)):
            pass
        await member.subscription.close()


async def handle_once(member: Member, effects: int, limit: int) -> bool:
    """Receive once, handle and settle the events, release what is revoked. False: ownership was no longer certain, so
    the remaining events were not handled."""
    done: list[Delivery] = []
    for message in await member.receive(limit=limit, wait_s=1.0):
        if type(message) is Delivery:
            if now() >= member.subscription.sure_until():
                return False
            if message.partition in member.assigned:
                os.write(effects, f"{message.event.key} {int(message.event.value or b'')}\n".encode())
                done.append(message)
        elif type(message) is Revoked:
            await member.settle(done)
            await member.release(message.partitions)
    await member.settle(done)
    return True


async def flood(broker: Broker, task: dict[str, Any]) -> None:
    n = 0
    report("joined")
    while n < task.get("count", 1_000_000):
        await broker.publish([event(task["topic"], f"flood-{i}", n) for i in range(task.get("batch", 100))])
        n += 1
        if task.get("pause_s"):
            await asyncio.sleep(task["pause_s"])
    report("flooded", batches=n)
    await asyncio.Event().wait()


async def aside(broker: Broker, task: dict[str, Any]) -> None:
    member = await (await Member.join(broker, task["topic"], task["group"], yields=False)).hold(1)
    (assigned,) = member.assigned.values()
    deliveries = (await member.take(12)).copy()
    settle = member.subscription.settle
    ids = []
    for n, delivery in enumerate(deliveries):
        record = make_record(delivery, assigned.log_id, State.HELD, group=task["group"])
        name = record_id(task["group"], assigned.log_id, delivery.partition, delivery.position)
        ids.append(name)
        report("setting", number=n)
        await settle(member.progress([delivery]), aside=[msgspec.structs.replace(record, id=name)])
        report("set", number=n)
    for n, name in enumerate(ids):
        report("removing", number=n)
        await settle([], gone=[name])
        report("removed", number=n)


async def main() -> None:
    task = json.loads(sys.argv[1])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    broker = await open_broker(settings.load(task["url"], **task["settings"]))
    await {"hold": hold, "watch": watch, "work": work, "flood": flood, "aside": aside}[task["mode"]](broker, task)
    await broker.close()


if __name__ == "__main__":
    asyncio.run(main())
