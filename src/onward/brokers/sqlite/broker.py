"""The SQLite broker: implements the contract with a writer, readers, a doorbell and lease managers."""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onward import clock
from onward.brokers.base import (
    Asks,
    Broker,
    Change,
    Features,
    Figure,
    Finding,
    GroupInfo,
    MemberInfo,
    Ordering,
    Relay,
    Start,
    Supervised,
    TopicSpec,
    Topology,
)
from onward.brokers.core.holdings import Holdings
from onward.brokers.core.publishing import check_events, check_relay
from onward.brokers.core.subscription import check_start
from onward.brokers.sqlite import checkup, figures, group_version, leases, topics
from onward.brokers.sqlite.aside import SqliteAside
from onward.brokers.sqlite.backlog import Backlog
from onward.brokers.sqlite.bells import Bells, bells_path
from onward.brokers.sqlite.callers_transaction import TransactionPublisher
from onward.brokers.sqlite.doorbell import Doorbell
from onward.brokers.sqlite.gate import Gate, lock_path
from onward.brokers.sqlite.lease_manager import LeaseManager, LogPlace, SqliteMember
from onward.brokers.sqlite.outgoing import Appender, Packer, Parcel, combined
from onward.brokers.sqlite.queue import Job
from onward.brokers.sqlite.reader import StoreReader
from onward.brokers.sqlite.retention import Retention
from onward.brokers.sqlite.store import Store, check, locate
from onward.brokers.sqlite.subscription import Access, SqliteSubscription
from onward.brokers.sqlite.topics import Catalogue
from onward.brokers.sqlite.transaction import Transaction
from onward.brokers.sqlite.writer import Writer
from onward.errors import BadStore, BrokerError, Closed, ConfigError
from onward.event import Event
from onward.settings import Settings, check_name

Joined = tuple[LeaseManager, Callable[[], None]]


def open_broker(url: str, settings: Settings) -> Broker:
    """Open the file that the URL names, or create it. Raises BadStore if it cannot be a store of Onward; then the file
    is not changed."""
    path = locate(url)
    try:
        path = path.resolve()  # so that all names of one file lead to the same lock file
        check(path)
        store, gate = Store(path, settings), _gate(path, settings)
    except (OSError, ValueError) as error:  # not a valid file name, or a file system without regular files
        raise BadStore(f"{path} cannot be opened or created ({error}); name a file in a folder that you own") from error
    try:
        store.prepare(gate)
        return SqliteBroker(store, gate, settings)
    except OSError as error:
        gate.close()
        raise BadStore(f"{path} cannot be created ({error}); name a file in a folder that you own") from error
    except BaseException:
        gate.close()
        raise


def _gate(path: Path, settings: Settings) -> Gate:
    lock = lock_path(path)
    try:
        return Gate(lock, settings.file_mode)
    except PermissionError as error:
        raise BadStore(
            f"{path}: no permission to use its lock {lock}; run as the user who owns it, or change its mode and set "
            f"file_mode=umask for every process"
        ) from error


class SqliteBroker:
    def __init__(self, store: Store, gate: Gate, settings: Settings) -> None:
        self.features = Features(
            stable_positions=True,
            fence=True,
            durability=settings.durability or "fsync",
            aside=True,
            starts=frozenset({"earliest", "latest", "time"}),
            fenced_publish=True,
            append_in=True,
        )
        self._store = store
        self._settings = settings
        catalogue = Catalogue(settings)
        self._packer = Packer(catalogue, settings.max_event_bytes)
        self._bells = Bells(bells_path(store.path), Doorbell(gate.path))
        self._reader = StoreReader(store, "query")
        backlog = Backlog(settings.max_backlog_bytes)
        self._callers = TransactionPublisher(store, self._packer, backlog, self._bells, gate.path)
        self._writer = Writer(store, gate, self._bells, Appender(catalogue, self._packer, backlog), settings)
        self._writer.queue.add(Retention(settings, backlog, self._writer.queue.kick))
        self._epochs = itertools.count(1)
        self._subscriptions: set[SqliteSubscription] = set()
        self._leaving: set[asyncio.Future[None]] = set()  # subscriptions to close, because their callers were cancelled
        self._closed = False

    async def publish(self, events: Sequence[Event], *, relay: Relay | None = None) -> None:
        self._check_open()
        check_relay(relay)
        check_events(events)
        if not events:
            return
        loop = asyncio.get_running_loop()
        parcels = [Parcel(bundle, loop) for bundle in self._packer.bundles(events)]
        for parcel in parcels if relay is not None else ():
            parcel.relay = relay
        failures = await self._writer.publish(parcels)
        if failures:
            raise combined(failures)

    def append_in(self, connection: Any, events: Sequence[Event]) -> Callable[[], None] | None:
        self._check_open()
        return self._callers.append(connection, events)

    async def subscribe(
        self,
        topics: Sequence[str],
        *,
        group: str,
        member: str,
        ordering: Ordering,
        start: Start,
        supervised: Supervised | None = None,
        asks: Asks | None = None,
    ) -> SqliteSubscription:
        self._check_open()
        check_name("group", group)
        check_start(start)
        owner = f"{member}:{uuid.uuid4().hex}"
        holdings: Holdings[LogPlace] = Holdings(self._bells.of(owner))

        def join(tx: Transaction) -> Joined:
            found = [self._packer.catalogue.resolve(tx.db, topic)[0] for topic in dict.fromkeys(topics)]
            for topic in found:
                leases.enter(tx.db, group, topic.id, start)
            gone = frozenset() if supervised is None else supervised.gone
            enrolment = SqliteMember(group, owner, found, self._epochs, gone, self._bells)
            manager = LeaseManager(enrolment, holdings, self._settings, self._writer.queue.kick)
            return manager, manager.join(tx)

        job = self._writer.enter(join)
        joining = asyncio.ensure_future(self._joined(job, holdings))
        try:
            return await asyncio.shield(joining)
        except asyncio.CancelledError:
            if self._writer.queue.take_back(job):
                joining.cancel()
            else:
                # The join is committed or will be. If we ignored it, it would own partitions until its lease ends.
                self._leaving.add(asyncio.ensure_future(_left(joining)))
            raise

    async def _joined(self, job: Job[Joined], holdings: Holdings[LogPlace]) -> SqliteSubscription:
        manager, committed = await self._writer.done(job)
        committed()
        self._writer.queue.add(manager)
        access = Access(self._writer, StoreReader(self._store, f"reader-{manager.group}"))
        subscription = SqliteSubscription(manager, holdings, access, self._settings)
        self._subscriptions = {each for each in self._subscriptions if not each.is_closed} | {subscription}
        return subscription

    def aside(self, group: str) -> SqliteAside:
        return SqliteAside(group, self._writer, self._reader)

    async def declare(self, topology: Topology, *, apply: bool) -> Sequence[Change]:
        self._check_open()
        catalogue = self._packer.catalogue
        # If nothing is missing, no lock is needed. Then the application can open while it holds a transaction.
        found = await self._reader.run(lambda db: catalogue.declare(db, topology, apply=False))
        if not apply or not any(change.action == "create" for change in found):
            return found

        def create(tx: Transaction) -> list[Change]:
            changes = catalogue.declare(tx.db, topology, apply=True)
            group_version.bump_all(tx)
            return changes

        return await self._writer.call(create)

    async def topics(self) -> Sequence[TopicSpec]:
        self._check_open()
        return await self._reader.run(topics.listed)

    async def groups(self, topic: str) -> Sequence[GroupInfo]:
        self._check_open()
        return await self._reader.run(lambda db: figures.groups(db, topic, clock.now(), clock.boot_id()))

    async def owners(self, topic: str, group: str) -> Sequence[MemberInfo]:
        self._check_open()
        return await self._reader.run(lambda db: figures.owners(db, group, topic, clock.now(), clock.boot_id()))

    async def drop_group(self, topic: str, group: str) -> None:
        self._check_open()

        def drop(tx: Transaction) -> None:
            number = figures.topic_id(tx.db, topic)
            if number is not None:
                _check_unused(tx, topic, number, group)
                leases.forget(tx.db, group, number)

        await self._writer.call(drop)

    async def drop_topic(self, topic: str) -> None:
        self._check_open()

        def drop(tx: Transaction) -> None:
            number = figures.topic_id(tx.db, topic)
            if number is None:
                return
            for group in figures.group_names(tx.db, number):
                _check_unused(tx, topic, number, group)
            topics.delete(tx.db, number)
            self._packer.catalogue.forget()

        await self._writer.call(drop)

    def figures(self) -> Sequence[Figure]:
        return ()

    async def diagnose(self) -> Sequence[Finding]:
        self._check_open()
        path, private = self._store.path, self._settings.file_mode == "private"
        access = checkup.access(path) if private else []
        return [*await self._reader.run(lambda db: checkup.findings(db, path, self.features)), *access]

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*self._leaving)
        await asyncio.gather(*[subscription.close() for subscription in self._subscriptions])
        await self._writer.stop()
        await self._reader.close()
        self._bells.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the broker on {self._store.path} is closed")


def _check_unused(tx: Transaction, topic: str, number: int, group: str) -> None:
    members = figures.alive(tx.db, group, number, tx.now, clock.boot_id())
    if members:
        names = ", ".join(member.name for member in members)
        raise BrokerError(f"group {group} of topic {topic} is in use by {names}; stop them first")


async def _left(joining: "asyncio.Future[SqliteSubscription]") -> None:
    """Wait for the join, and leave the group again if it succeeds."""
    with contextlib.suppress(BrokerError, ConfigError):
        await (await joining).close()
