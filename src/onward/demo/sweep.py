"""What a run of the demo creates on a broker that others use too, and how it is removed again."""

import asyncio
from pathlib import Path

from onward.brokers.base import Broker
from onward.clock import now
from onward.demo.shop import URL_FILE, group_of, open_app, topic_of
from onward.settings import redacted

_MARGIN_S = 10.0  # beyond the lease, for a broker that notices late that a member was killed
_AGAIN_S = 0.5
_FROM_HERE = "used"  # this file exists once the broker has answered: from then on the run may have created something


async def reach(broker: Broker, folder: Path) -> None:
    """Before anything is created on a broker that others use too. BrokerError: it does not answer."""
    if (folder / URL_FILE).exists():
        await broker.groups(topic_of(folder))
        (folder / _FROM_HERE).touch()


def place(folder: Path) -> str:
    """Where data of this run may be, besides its folder; "" if nowhere else."""
    if not (folder / _FROM_HERE).exists():
        return ""
    return f"topic {topic_of(folder)} and group {group_of(folder)} on {redacted(open_app(folder).settings.url)}"


async def sweep(folder: Path) -> None:
    """Remove the run's topic and group. Their names are the run's own, so no other program has created them.

    BrokerError: they, or some of them, are still there."""
    if not (folder / _FROM_HERE).exists():
        return
    async with open_app(folder) as app:
        await _left(app.broker, folder, app.settings.lease_s + _MARGIN_S)
        await app.broker.drop_group(topic_of(folder), group_of(folder))
        await app.broker.drop_topic(topic_of(folder))


async def _left(broker: Broker, folder: Path, patience_s: float) -> None:
    """Wait until the group has no member any more."""
    end = now() + patience_s
    while now() < end:
        groups = await broker.groups(topic_of(folder))
        if not any(info.members for info in groups if info.group == group_of(folder)):
            return
        await asyncio.sleep(_AGAIN_S)
