"""The queues, exchanges and bindings of a work group at the server: declare, change, delete."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

import msgspec

from onward.brokers.rabbitmq import names, presence
from onward.brokers.rabbitmq.amqp import AmqpError, Channel, ChannelClosed, Connection
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel
from onward.brokers.rabbitmq.operate.topology import Queue
from onward.brokers.rabbitmq.registry.registry import TopicRegistry, other_kind
from onward.brokers.rabbitmq.registry.registry_fold import GroupEntry, TopicEntry
from onward.brokers.rabbitmq.server_errors import explained, is_missing
from onward.brokers.rabbitmq.work.suspects import STARTS_ARGUMENTS
from onward.brokers.rabbitmq.work.tiers import NORMAL_TIER, TRIED, TierExchange, WorkRoute
from onward.brokers.rabbitmq.work.work_place import WorkPlace, own_exchanges, own_queues, rungs
from onward.errors import BrokerError

log = logging.getLogger("onward")

_LEARNT_S = 0.2  # until publishers, which follow the registry, know of a new group
_TIER = "tier:"  # in the routes of the registry: the group has had this tier, and its queue may have messages


async def declare(connection: Connection, registry: TopicRegistry, place: WorkPlace, *, joins: bool) -> WorkPlace:
    """Declare what the group needs, and return its place, with the queues of tiers that it had before.

    `joins`: the group gets the routes of this member. Otherwise it keeps those that the last member gave it that
    joined. Raises BrokerError with the thing, the cause and the cure."""
    what = f"the queues of {place}"
    try:
        await registry.catch_up()
        known = registry.groups(place.topic).get(place.group)
        if known is not None and known.kind != "work":  # nothing is declared for a member that will be refused
            raise BrokerError(other_kind(known))
        missing = await _missing(connection, place, known) if place.is_own and known is not None else []
        channel = await connection.channel()
        place = await _declare_queues(channel, known, place)
        await channel.close()
        for queue in missing:
            log.warning("RabbitMQ: queue %s was missing and is declared again; the messages in it are lost", queue)
        entry = await registry.add_group(place.topic, place.group, "work")
        if place.is_own:
            what = f"the bindings of {place}"
            channel = await connection.channel()
            await _route(channel, registry, place, entry, joins=joins or not entry.routes)
            await channel.close()
        if known is None:
            await asyncio.sleep(_LEARNT_S)
    except AmqpError as error:
        raise BrokerError(_cured(error, what, place)) from error
    return place


async def _missing(connection: Connection, place: WorkPlace, known: GroupEntry) -> list[str]:
    """The queues that the group has had and that do not exist."""
    probe = ProbeChannel(connection)
    queues = [*queues_of(known, None), place.suspects]
    found = [queue for queue in queues if not await probe.has_queue(queue)]
    await probe.close()
    return found


async def _declare_queues(channel: Channel, known: GroupEntry | None, place: WorkPlace) -> WorkPlace:
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
        await declare_tier(channel, exchange)
    return place


def queues_of(group: GroupEntry, declared: Queue | None) -> list[str]:
    """The queues of a group, with those of all tiers that it has had. `declared`: the application's queue of its name.

    A group without routes is a queue of another program."""
    if declared is not None or not group.routes:
        return [group.group] if declared is None else list(declared.tier_queues.values())
    tiers = [tier for tier in TRIED if f"{_TIER}{tier}" in group.routes]
    return [names.work_queue(group.topic, group.group, tier) for tier in (None, *tiers)]


def _with_former_tiers(place: WorkPlace, routes: Sequence[str]) -> WorkPlace:
    former = [tier for tier in TRIED if f"{_TIER}{tier}" in routes and tier not in place.queues]
    queues = {tier: names.work_queue(place.topic, place.group, tier) for tier in former}
    return msgspec.structs.replace(place, queues={**place.queues, **queues}) if former else place


async def declare_tier(channel: Channel, exchange: TierExchange) -> None:
    alternate = {"alternate-exchange": exchange.alternate} if exchange.alternate else {}
    await channel.declare_exchange(exchange.name, exchange.kind, arguments=alternate)


def bindings_of(known: GroupEntry) -> set[str]:
    """The bindings that the group may have at the server, as texts of WorkRoute. What another program has written into
    the registry is left out."""
    return {each for each in known.routes if WorkRoute.is_text(each)}


async def _route(
    channel: Channel, registry: TopicRegistry, place: WorkPlace, known: GroupEntry, *, joins: bool
) -> None:
    """Bind as wanted, and then unbind what was wanted before. In between an event may arrive in two tiers, but none is
    lost. The registry always has every binding that may exist, because AMQP cannot list them."""
    before = bindings_of(known)
    wanted = {str(route) for route in place.routing.routes} if joins else before
    tiers = {each for each in known.routes if each.startswith(_TIER)}
    tiers |= {f"{_TIER}{tier}" for tier in place.queues if tier != NORMAL_TIER}
    if wanted | tiers != set(known.routes):
        await registry.set_routes(place.topic, place.group, sorted(wanted | before | tiers))
    await bind(channel, place.exchange, wanted)  # again, because a queue that was deleted has lost its bindings
    await unbind(channel, place.exchange, before - wanted)
    if before - wanted:
        log.info("%s: its routes have changed", place)
        await registry.set_routes(place.topic, place.group, sorted(wanted | tiers))


async def route_again(connection: Connection, topic: TopicEntry, groups: Iterable[GroupEntry]) -> None:
    """Create the exchange of the topic, and bind the queues of its work groups. Raises AmqpError."""
    exchange = names.exchange(topic.name)
    channel = await connection.channel()
    await channel.declare_exchange(exchange, "topic", arguments=topic.exchange_arguments)
    for group in groups:
        try:
            await bind(channel, exchange, bindings_of(group))
        except ChannelClosed as error:  # its queue is missing: a member declares and binds it again
            log.debug("RabbitMQ: group %s of topic %s was not bound again: %s", group.group, topic.name, error)
            channel = await connection.channel()
    await channel.close()


async def bind(channel: Channel, exchange: str, routes: Iterable[str]) -> None:
    """`exchange`: of the topic."""
    for route in map(WorkRoute.parse, sorted(routes)):
        make = channel.bind_exchange if route.to_exchange else channel.bind_queue
        await make(route.target, route.source or exchange, route.key)


async def unbind(channel: Channel, exchange: str, routes: Iterable[str]) -> None:
    for route in map(WorkRoute.parse, sorted(routes)):
        remove = channel.unbind_exchange if route.to_exchange else channel.unbind_queue
        await remove(route.target, route.source or exchange, route.key)


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
