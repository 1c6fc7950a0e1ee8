"""The calls to the broker that are in flight for one plane: its settle, and the pages of records it reads."""

import asyncio
import logging
from collections.abc import Container, Sequence

from onward.brokers.base import Broker, Subscription
from onward.errors import AsideError, BrokerError, Closed, StoreLost
from onward.event import Partition
from onward.flow.actions import LoadPage, SettleCall
from onward.flow.plane import ControlPlane
from onward.flow.run_outcomes import instant
from onward.handler import Handler

log = logging.getLogger("onward")

_PAGE = 1_000  # records read from the aside at once
_RETRY_S = 1.0


class RetriedCalls:
    """Calls to the broker that fail and are tried again. Each call is logged once until it succeeds; so long readiness
    shows the cause."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the handler
        self._failing: dict[str, str] = {}

    @property
    def troubles(self) -> list[str]:
        return list(self._failing.values())

    def failed(self, what: str, error: Exception) -> None:
        """An error that no broker should raise is reported too: the call is tried again, and readiness shows it."""
        if not isinstance(error, BrokerError):
            if what not in self._failing:
                log.error("%s: %s failed, trying again: %r", self._name, what, error, exc_info=error)
            self._failing[what] = f"{what} failed: {error!r}; the log has the traceback"
            return
        if isinstance(error, StoreLost):  # no call can succeed any more, so log it once for all calls
            if str(error) not in self._failing.values():
                log.error("%s: %s", self._name, error)
        elif what not in self._failing:
            log.warning("%s: %s failed, trying again until it succeeds: %s", self._name, what, error)
        self._failing[what] = str(error)

    def succeeded(self, what: str) -> None:
        self._failing.pop(what, None)


class BrokerTasks:
    """Starts the calls and passes the answers to the plane. `wake` is set after each answer."""

    def __init__(self, plane: ControlPlane, broker: Broker, handler: Handler, wake: asyncio.Event) -> None:
        self._plane = plane
        self._broker = broker
        self._handler = handler
        self._wake = wake
        self._settling: asyncio.Task[None] | None = None
        self._loading: set[asyncio.Task[None]] = set()
        self.retried = RetriedCalls(handler.name)
        self._refused: dict[Partition, str] = {}  # why records of these partitions cannot be stored now

    @property
    def is_settling(self) -> bool:
        return self._settling is not None

    def troubles(self, held: Container[Partition]) -> list[str]:
        return [*(why for partition, why in self._refused.items() if partition in held), *self.retried.troubles]

    def settle(self, subscription: Subscription, call: SettleCall) -> None:
        self._settling = asyncio.create_task(self._settle(subscription, call))

    def load(self, page: LoadPage) -> None:
        task = asyncio.create_task(self._load(page))
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def cancel(self) -> None:
        """Cancel all calls. If a settle was in flight, `is_settling` stays True."""
        for task in (self._settling, *self._loading):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _settle(self, subscription: Subscription, call: SettleCall) -> None:
        """Repeat the same settle until it is answered."""
        while True:
            try:
                lost = await subscription.settle(call.progress, aside=call.aside, gone=call.gone)
            except AsideError as error:
                self._answered(call, error.lost, error.partitions, str(error))
                break
            except Closed:
                self._plane.settled([progress.partition for progress in call.progress], instant())
                break
            except Exception as error:
                self.retried.failed("settling", error)
                await asyncio.sleep(_RETRY_S)
            else:
                self._answered(call, lost)
                break
        self._settling = None
        self._wake.set()

    def _answered(
        self, call: SettleCall, lost: Sequence[Partition], refused: Sequence[Partition] = (), why: str = ""
    ) -> None:
        """The broker settled it, except the partitions that are no longer ours and those whose records it refused."""
        handler = self._handler
        self.retried.succeeded("settling")
        if refused and why not in self._refused.values():  # log each cause once
            log.error("%s: waiting, held and dead events cannot be stored; their keys wait: %s", handler.name, why)
        for record in call.aside:
            if record.partition in refused:
                self._refused[record.partition] = why
            else:
                self._refused.pop(record.partition, None)
        if refused:
            self._plane.aside_refused(refused, lost, instant())
        else:
            self._plane.settled(lost, instant())
        if handler.inbox is not None:
            settled = [each for each in call.progress if each.partition not in (*lost, *refused)]
            handler.inbox.settled(handler.group, settled)

    async def _load(self, page: LoadPage) -> None:
        """Read a page of records. Retry until it succeeds; the events that depend on it wait."""
        limits, aside = self._plane.limits, self._broker.aside(self._handler.group)
        while True:
            try:
                records = await aside.load(
                    page.partition,
                    after=page.after,
                    limit=_PAGE,
                    max_bytes=limits.max_in_flight_bytes,
                    dead=limits.on_dead == "hold",
                )
            except Closed:
                return
            except Exception as error:
                self.retried.failed(f"reading the records of {page.partition}", error)
                await asyncio.sleep(_RETRY_S)
            else:
                self.retried.succeeded(f"reading the records of {page.partition}")
                break
        self._plane.loaded(page, records, instant())
        self._wake.set()
