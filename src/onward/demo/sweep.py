"""Removes what a run of the demo created on a broker that other applications use too."""

import asyncio
from pathlib import Path

from onward.brokers.base import Broker
from onward.clock import now
from onward.demo.shop import URL_FILE, group_of, open_app, topic_of
from onward.settings import redacted

_MARGIN_S = 10.0  # added to the lease, because a broker may notice a killed member late
_AGAIN_S = 0.5
_FROM_HERE = "used"  # this file exists once the broker has answered: from then on the run may have created a topic


async def reach(broker: Broker, folder: Path) -> None:
    """Check that the broker answers before the run creates anything there. BrokerError: it does not answer."""
    if (folder / URL_FILE).exists():
        await broker.groups(topic_of(folder))
        (folder / _FROM_HERE).touch()


def place(folder: Path) -> str:
    """Where this run may have stored data outside its folder; "" if nowhere."""
    if not (folder / _FROM_HERE).exists():
        return ""
    return f"topic {topic_of(folder)} and group {group_of(folder)} on {redacted(open_app(folder).settings.url)}"


async def sweep(folder: Path) -> None:
    """Remove the run's topic and group. Their names are unique to the run, so no other program uses them.

    BrokerError: some of them may still be there."""
    if not (folder / _FROM_HERE).exists():
        return
    async with open_app(folder) as app:
        await _left(app.broker, folder, app.settings.lease_s + _MARGIN_S)
        await app.broker.drop_group(topic_of(folder), group_of(folder))
        await app.broker.drop_topic(topic_of(folder))


async def _left(broker: Broker, folder: Path, patience_s: float) -> None:
    """Wait until the group has no members."""
    end = now() + patience_s
    while now() < end:
        groups = await broker.groups(topic_of(folder))
        if not any(info.members for info in groups if info.group == group_of(folder)):
            return
        await asyncio.sleep(_AGAIN_S)
