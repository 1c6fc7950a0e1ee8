"""Keeps the bindings of a work group while a member runs.

A queue whose binding was removed gets no events, and neither the publisher nor its members notice. AMQP cannot list
bindings, so a member makes all of them again every few seconds. For a binding that exists this changes nothing.
"""

import asyncio
import logging
from functools import partial

from onward.brokers.rabbitmq.amqp import Channel, ChannelClosed, Connection
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel
from onward.brokers.rabbitmq.registry.registry import TopicRegistry
from onward.brokers.rabbitmq.server_errors import explained
from onward.brokers.rabbitmq.work import work_objects
from onward.brokers.rabbitmq.work.work_place import WorkPlace
from onward.errors import BrokerError

log = logging.getLogger("onward")

INTERVAL_S = 3.0


class RouteWatch:
    """Of one session. `creates`: it declares the topic's exchange again if that is missing. `trouble`: why the group
    may get no events."""

    def __init__(self, connection: Connection, registry: TopicRegistry, place: WorkPlace, *, creates: bool) -> None:
        self.trouble = ""
        self._connection = connection
        self._registry = registry
        self._place = place
        self._creates = creates
        self._bound: set[str] = set()  # the routes of the last round

    async def run(self) -> None:
        """Until it is cancelled. Raises AmqpError if the connection ends."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self._look()

    async def _look(self) -> None:
        probe = ProbeChannel(self._connection)
        try:
            self.trouble = await self._bind_again(probe)
        except ChannelClosed as error:
            self.trouble = explained(error, f"the bindings of {self._place}")
        except BrokerError as error:
            self.trouble = str(error)
        finally:
            await probe.close()

    async def _bind_again(self, probe: ProbeChannel) -> str:
        """Returns why that is not possible."""
        place = self._place
        group = self._registry.groups(place.topic).get(place.group)
        if group is None:
            return f"{place} was dropped while this member runs; start it again to create the group"
        if not await probe.has_exchange(place.exchange):
            topic = self._registry.topic(place.topic)
            if topic is None or not self._creates:
                return (
                    f"exchange {place.exchange} does not exist, so {place} gets no events; create it with "
                    "`onward topology apply --app MODULE:APP`, or turn auto_declare on"
                )
            groups = [each for each in self._registry.groups(place.topic).values() if each.kind == "work"]
            await work_objects.route_again(self._connection, topic, groups)
            self._warn(place.exchange)
        await self._declare_tiers(probe)
        routes = work_objects.bindings_of(group)
        gone = self._bound - routes  # a member that joined later has replaced these, perhaps while we made them again

        async def bind(channel: Channel) -> None:
            await work_objects.bind(channel, place.exchange, routes)
            await work_objects.unbind(channel, place.exchange, gone)

        await probe.ask(bind)
        self._bound = routes
        return ""

    async def _declare_tiers(self, probe: ProbeChannel) -> None:
        for exchange in reversed(self._place.routing.exchanges):
            if not await probe.has_exchange(exchange.name):
                await probe.ask(partial(work_objects.declare_tier, exchange=exchange))
                self._warn(exchange.name)

    def _warn(self, exchange: str) -> None:
        log.warning(
            "RabbitMQ: exchange %s was missing and is declared again; %s did not get the events that were published "
            "meanwhile",
            *(exchange, self._place),
        )
