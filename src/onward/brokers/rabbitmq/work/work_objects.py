"""The queues, exchanges and bindings of a work group at the server: declare, change, delete."""

import logging
from collections.abc import Collection, Sequence

import msgspec

from onward.brokers.rabbitmq import names, presence
from onward.brokers.rabbitmq.amqp import AmqpError, Channel, Connection
from onward.brokers.rabbitmq.registry.registry import TopicRegistry
from onward.brokers.rabbitmq.server_errors import explained, is_missing
from onward.brokers.rabbitmq.work.suspects import STARTS_ARGUMENTS
from onward.brokers.rabbitmq.work.tiers import NORMAL_TIER, TRIED, WorkRoute
from onward.brokers.rabbitmq.work.work_place import WorkPlace, own_exchanges, own_queues, rungs
from onward.errors import BrokerError

log = logging.getLogger("onward")

_TIER = "tier:"  # in the routes of the registry: the group has had this tier, and its queue may have messages


async def declare(connection: Connection, registry: TopicRegistry, place: WorkPlace, *, joins: bool) -> WorkPlace:
    """Declare what the group needs, and return its place, with the queues of tiers that it had before.

    `joins`: the group gets the routes of this member. Otherwise it keeps those that the last member gave it that
    joined. Raises BrokerError with the thing, the cause and the cure."""
    what = f"the queues of {place}"
    try:
        channel = await connection.channel()
        place = await _declare_queues(channel, registry, place)
        await channel.close()
        entry = await registry.add_group(place.topic, place.group, "work")
        if place.is_own:
            what = f"the bindings of {place}"
            channel = await connection.channel()
            await _route(channel, registry, place, entry.routes, joins=joins or not entry.routes)
            await channel.close()
    except AmqpError as error:
        raise BrokerError(_cured(error, what, place)) from error
    return place


async def _declare_queues(channel: Channel, registry: TopicRegistry, place: WorkPlace) -> WorkPlace:
    known = registry.groups(place.topic).get(place.group)
    if place.is_own and known is not None:
        place = _with_former_tiers(place, known.routes)
    for queue in place.queues.values():
        if place.is_own:
            await channel.declare_queue(queue, arguments=names.WORK_ARGUMENTS)
        else:
            await channel.declare_queue(queue, passive=True)
    await channel.declare_queue(place.suspects, arguments=names.WORK_ARGUMENTS)
    await channel.declare_queue(place.starts, arguments=STARTS_ARGUMENTS)
    await presence.declare(channel, place.topic, place.group)
    for exchange in reversed(place.routing.exchanges):
        alternate = {"alternate-exchange": exchange.alternate} if exchange.alternate else {}
        await channel.declare_exchange(exchange.name, exchange.kind, arguments=alternate)
    return place


def _with_former_tiers(place: WorkPlace, routes: Sequence[str]) -> WorkPlace:
    former = [tier for tier in TRIED if f"{_TIER}{tier}" in routes and tier not in place.queues]
    queues = {tier: names.work_queue(place.topic, place.group, tier) for tier in former}
    return msgspec.structs.replace(place, queues={**place.queues, **queues}) if former else place


async def _route(
    channel: Channel, registry: TopicRegistry, place: WorkPlace, known: Collection[str], *, joins: bool
) -> None:
    """Bind as wanted, and then unbind what was wanted before. In between an event may arrive in two tiers, but none is
    lost. The registry always has every binding that may exist, because AMQP cannot list them."""
    wanted = {str(route) for route in place.routing.routes}
    tiers = {each for each in known if each.startswith(_TIER)}
    tiers |= {f"{_TIER}{tier}" for tier in place.queues if tier != NORMAL_TIER}
    before = {each for each in known if not each.startswith(_TIER)}
    if not joins:
        wanted = before
    if wanted | tiers != set(known):
        await registry.set_routes(place.topic, place.group, sorted(wanted | before | tiers))
    for route in map(WorkRoute.parse, sorted(wanted)):  # again, because a queue that was deleted has lost its bindings
        source = route.source or place.exchange
        if route.to_exchange:
            await channel.bind_exchange(route.target, source, route.key)
        else:
            await channel.bind_queue(route.target, source, route.key)
    for route in map(WorkRoute.parse, sorted(before - wanted)):
        source = route.source or place.exchange
        if route.to_exchange:
            await channel.unbind_exchange(route.target, source, route.key)
        else:
            await channel.unbind_queue(route.target, source, route.key)
    if before - wanted:
        log.info("%s: its routes have changed", place)
        await registry.set_routes(place.topic, place.group, sorted(wanted | tiers))


async def delete(connection: Connection, topic: str, group: str) -> None:
    """Delete everything of the group but its aside. Rungs go first: with their work queue gone, they would wait for it.
    A foreign queue stays."""
    try:
        channel = await connection.channel()
        for name in (*rungs(topic, group), *own_queues(topic, group)):
            await channel.delete_queue(name)
        await presence.delete(channel, topic, group)
        for name in own_exchanges(topic, group):
            await channel.delete_exchange(name)
        await channel.close()
    except AmqpError as error:
        raise BrokerError(explained(error, f"the queues of group {group} of topic {topic}")) from error


def _cured(error: AmqpError, what: str, place: WorkPlace) -> str:
    text = explained(error, what)
    if is_missing(error) and not place.is_own:
        return f"{text}; declare the queue, or create it with `onward topology apply`"
    if is_missing(error):
        return f"{text}; is the topic there?"
    return text
