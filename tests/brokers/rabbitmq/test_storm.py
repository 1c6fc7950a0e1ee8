"""Members, or the node, that are killed with kill -9 under load, for ONWARD_STORM_S seconds.

An ordered group and a work group handle the same topic. Some events fail once, and some become dead letters."""

import asyncio
import functools
import json
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from onward.brokers.base import State
from onward.brokers.rabbitmq.ordered.takeover import PREFETCH
from onward.testing.failure_shop import eventually
from onward.testing.scenario import Process, first_times
from tests.brokers.rabbitmq.fault_shop import KINDS, SETTINGS, FaultShop, rarely_fail, until
from tests.servers.rabbitmq import RabbitMQServer
from tests.storm import STORM_S, check_fences, read, seeded

pytestmark = [pytest.mark.slow, pytest.mark.storm, pytest.mark.timeout(STORM_S + 300)]

MEMBERS = 3
KEYS = 50
BATCH = 50
PARTITIONS = 4
REPAIR_S = 150.0  # a queue that the server has forgotten is replaced after 30 s, and its deletion may take 20 s
OPEN = 100  # events that a member has open in a partition, at most
STORM_SETTINGS = {**SETTINGS, "partitions": PARTITIONS, "max_in_flight": OPEN}


class StormMember(Process):
    def __init__(self, url: str, folder: Path) -> None:
        task = {"url": url, "settings": STORM_SETTINGS, "folder": str(folder)}
        super().__init__(["-m", "tests.brokers.rabbitmq.storm_member", json.dumps(task)])


class Storm:
    """A publisher, and members of both groups in processes of their own. `kills`: how often a member lost what it had
    open."""

    def __init__(self, server: RabbitMQServer, vhost: str, folder: Path, rng: random.Random) -> None:
        self.server = server
        self.vhost = vhost
        self.folder = folder
        self.rng = rng
        self.kills = 0
        self._is_over = False
        self.url = server.url_of(vhost)
        self.shop = FaultShop(self.url, "ordered", rarely_fail, **STORM_SETTINGS)  # it only publishes
        self.shop.keys = KEYS
        self.members = [StormMember(self.url, folder) for _ in range(MEMBERS)]

    async def run(self, strike: Callable[["Storm"], Awaitable[None]]) -> None:
        """Publish all the time, and strike again and again. Then everything must be there."""
        try:
            async with self.shop.app:
                await self._begun()
                publishing = asyncio.create_task(self._published())
                end = time.monotonic() + STORM_S
                while time.monotonic() < end:
                    await self._flowed()
                    await asyncio.sleep(self.rng.uniform(0, 2.5))
                    await strike(self)
                self._is_over = True
                await publishing
                for group in KINDS:
                    await self._balanced(group)
                await self._nothing_is_left()
        finally:
            for member in self.members:
                member.end()

    async def _begun(self) -> None:
        """Both groups handle events, and what they have at the server survives a kill of the node."""
        for member in self.members:
            await member.line(90.0)
        await self.shop.publish(10 * BATCH)
        for group in KINDS:
            await self._balanced(group)
        await asyncio.to_thread(self.server.until_durable, self.vhost)

    async def _published(self) -> None:
        while not self._is_over:
            await self.shop.publish(BATCH)
            await asyncio.sleep(0.05)

    async def _flowed(self) -> None:
        """Wait until some events were accepted since the last strike."""
        enough = len(self.shop.accepted) + 4 * BATCH
        await until(lambda: len(self.shop.accepted) >= enough, "events are accepted again", self.shop)

    async def _balanced(self, group: str) -> None:
        """Wait until every accepted event is handled or a dead letter, as long as there is progress."""
        before, deadline = -1, 0.0
        while missing := self.shop.accepted - await self._ended(group):
            if len(missing) != before:
                before, deadline = len(missing), time.monotonic() + REPAIR_S
            assert time.monotonic() < deadline, f"{len(missing)} accepted events are missing: {sorted(missing)[:9]}"
            await asyncio.sleep(0.5)

    async def _ended(self, group: str) -> set[int]:
        """The events that are handled, or dead letters."""
        handled = {each.n for each in read(self.folder / f"{group}.handled")}
        records = await self.shop.records(group)
        return handled | {int(each.event.value or b"") for each in records if each.state is State.DEAD}

    async def _nothing_is_left(self) -> None:
        """No event waits anywhere, and members that are gone have left nothing of their own at the server."""
        for group in KINDS:
            await eventually(functools.partial(self._all_dead, group), f"no record of {group} waits", 60)
        await eventually(self._is_empty, "the queues are empty", 60)
        for member in self.members:
            member.kill()
        await eventually(self._is_tidy, "no queue of a member is left", 60)

    async def _all_dead(self, group: str) -> bool:
        return {each.state for each in await self.shop.records(group)} <= {State.DEAD}

    async def _is_empty(self) -> bool:
        queues = await asyncio.to_thread(self.server.queues, self.vhost)
        quorum = {name: each.get("messages") for name, each in queues.items() if each["type"] == "quorum"}
        return all(count in (range(PREFETCH + 1) if ".token" in name else (0,)) for name, count in quorum.items())

    async def _is_tidy(self) -> bool:
        return not any(each["exclusive"] for each in (await asyncio.to_thread(self.server.queues, self.vhost)).values())


def check(storm: Storm) -> None:
    """Nothing ran that was refused, only the killed members' open events ran again, and each key ran in order."""
    shop = storm.shop
    for group in KINDS:
        tried = read(storm.folder / f"{group}.tried")
        numbers = {each.n for each in tried}
        again = len(tried) - sum(2 if rarely_fail(n) == "later" else 1 for n in numbers)
        print(f"{group}: {len(shop.accepted)} events, {len(shop.unknown)} unknown, {storm.kills} kills, {again} again")  # noqa: T201
        assert numbers <= shop.accepted | shop.unknown, "a refused event ran"
        assert again <= storm.kills * OPEN, "too many events ran again"
    ordered = read(storm.folder / "ordered.handled")
    for key, first in first_times((each.key, each.n) for each in ordered).items():
        assert first == sorted(first), f"{key} ran out of order"
    check_fences(ordered)


async def kill_a_member(storm: Storm) -> None:
    storm.members.pop(storm.rng.randrange(MEMBERS)).end()
    storm.members.append(StormMember(storm.url, storm.folder))
    storm.kills += 1


def test_members_that_are_killed_lose_and_invert_nothing(rabbitmq_server: RabbitMQServer, tmp_path: Path) -> None:
    with rabbitmq_server.vhost() as vhost:
        storm = Storm(rabbitmq_server, vhost, tmp_path, seeded())
        asyncio.run(storm.run(kill_a_member))
        check(storm)


async def kill_the_node(storm: Storm) -> None:
    await asyncio.to_thread(storm.server.kill)
    await asyncio.sleep(storm.rng.uniform(0, 1))
    await asyncio.to_thread(storm.server.start)
    storm.kills += MEMBERS  # each of them loses its connections


def test_a_node_that_is_killed_loses_and_inverts_nothing(tmp_path: Path) -> None:
    server = RabbitMQServer()
    try:
        server.start()
        storm = Storm(server, "/", tmp_path, seeded())
        asyncio.run(storm.run(kill_the_node))
        check(storm)
    finally:
        server.close()
