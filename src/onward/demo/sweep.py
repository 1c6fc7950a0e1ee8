"""What a run of the demo makes on a broker that others use too, and how it goes away again."""

import asyncio
from pathlib import Path
from typing import Protocol, runtime_checkable

from onward import settings
from onward.brokers import open_broker
from onward.brokers.base import Broker
from onward.clock import now
from onward.demo.shop import OTHER_LEASE_S, URL_FILE, group_of, topic_of
from onward.errors import BrokerError

_LEFT_S = OTHER_LEASE_S + 10.0  # a worker that was killed is a member of the group until its lease is over
_AGAIN_S = 0.5
_FROM_HERE = "used"  # this file is there once the broker has answered, so that something may have been made on it


@runtime_checkable
class DropsTopics(Protocol):
    """A broker that can delete a topic."""

    async def drop_topic(self, topic: str) -> None: ...


async def reach(broker: Broker, folder: Path) -> None:
    """Before anything is made on a broker that others use too. BrokerError: it does not answer."""
    if (folder / URL_FILE).exists():
        await broker.groups(topic_of(folder))
        (folder / _FROM_HERE).touch()


def place(folder: Path) -> str:
    """Where data of this run may be, beside its folder; empty where that is all."""
    if not (folder / _FROM_HERE).exists():
        return ""
    url = settings.redacted(_settings(folder).url)
    return f"topic {topic_of(folder)} and group {group_of(folder)} on {url}"


async def sweep(folder: Path) -> None:
    """Remove the run's topic and group. Their names are the run's own, so nobody else has made them.

    BrokerError: they, or some of them, are still there."""
    if not (folder / _FROM_HERE).exists():
        return
    broker = await open_broker(_settings(folder))
    try:
        await _left(broker, folder)
        await broker.drop_group(topic_of(folder), group_of(folder))
        if not isinstance(broker, DropsTopics):
            raise BrokerError("this broker keeps its topics")
        await broker.drop_topic(topic_of(folder))
    finally:
        await broker.close()


async def _left(broker: Broker, folder: Path) -> None:
    """Wait until the group has no member any more."""
    end = now() + _LEFT_S
    while now() < end:
        groups = await broker.groups(topic_of(folder))
        if not any(info.members for info in groups if info.group == group_of(folder)):
            return
        await asyncio.sleep(_AGAIN_S)


def _settings(folder: Path) -> settings.Settings:
    return settings.load((folder / URL_FILE).read_text())
