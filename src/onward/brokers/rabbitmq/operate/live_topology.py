"""What the server has of a declared topology: asked over AMQP, or read from the management API."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from onward.brokers.rabbitmq.amqp import Channel
from onward.brokers.rabbitmq.operate.differences import Difference, of_reply, of_tables
from onward.brokers.rabbitmq.operate.management import ManagementApi
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel
from onward.brokers.rabbitmq.operate.routing import ExchangeRoute
from onward.brokers.rabbitmq.operate.topology import BUILT_IN, DEFAULT_EXCHANGE, Exchange, PlainTopology, Queue
from onward.brokers.rabbitmq.operate.topology_plan import LiveExchange, LiveTopology
from onward.brokers.rabbitmq.server_errors import DIFFERS, REFUSED

log = logging.getLogger("onward")

_MOST_ARGUMENTS = 30  # that are compared with an object, one by one


# -- over AMQP ------------------------------------------------------------------------------------------------------


class _Names(NamedTuple):
    """What a topology names, declared or not."""

    exchanges: set[str]
    queues: set[str]


def _named(wanted: PlainTopology) -> _Names:
    tables = [queue.table for queue in wanted.queues.values()]
    exchanges = {*wanted.exchanges, *(each.exchange for each in wanted.bindings)}
    exchanges |= {each.to_exchange for each in wanted.bindings if each.to_exchange}
    exchanges |= {each.alternate for each in wanted.exchanges.values() if each.alternate is not None}
    exchanges |= {table["x-dead-letter-exchange"] for table in tables if "x-dead-letter-exchange" in table}
    queues = {*wanted.queues, *(each.queue for each in wanted.bindings if each.queue)}
    direct = [table for table in tables if table.get("x-dead-letter-exchange") == DEFAULT_EXCHANGE]
    queues |= {table["x-dead-letter-routing-key"] for table in direct if "x-dead-letter-routing-key" in table}
    return _Names(exchanges - {DEFAULT_EXCHANGE, *BUILT_IN}, queues)


async def asked(wanted: PlainTopology, probe: ProbeChannel, *, compare: bool) -> LiveTopology:
    """`compare`: also compare arguments. The server does that only when it is asked to declare an object again, which
    needs the permission to configure it."""
    names = _named(wanted)
    exchanges = {name for name in sorted(names.exchanges) if await probe.has_exchange(name)}
    queues = {name for name in sorted(names.queues) if await probe.has_queue(name)}
    return LiveTopology(
        {
            name: LiveExchange(await _exchange_differences(probe, wanted.exchanges.get(name), compare=compare))
            for name in exchanges
        },
        {name: await _queue_differences(probe, wanted.queues.get(name), compare=compare) for name in queues},
    )


async def _exchange_differences(probe: ProbeChannel, wanted: Exchange | None, *, compare: bool) -> list[Difference]:
    if wanted is None or not compare:
        return []
    fields = {"type": wanted.kind, "durable": wanted.durable, "auto_delete": False, "internal": False}

    async def again(channel: Channel, fields: Mapping[str, Any], table: Mapping[str, Any]) -> None:
        await channel.declare_exchange(
            wanted.name,
            fields["type"],
            durable=fields["durable"],
            auto_delete=fields["auto_delete"],
            internal=fields["internal"],
            arguments=table,
        )

    return await _differences(probe, f"exchange {wanted.name}", again, fields, wanted.table)


async def _queue_differences(probe: ProbeChannel, wanted: Queue | None, *, compare: bool) -> list[Difference]:
    if wanted is None or not compare:
        return []
    fields = {"durable": wanted.durable, "auto_delete": False}

    async def again(channel: Channel, fields: Mapping[str, Any], table: Mapping[str, Any]) -> None:
        await channel.declare_queue(
            wanted.name, durable=fields["durable"], auto_delete=fields["auto_delete"], arguments=table
        )

    return await _differences(probe, f"queue {wanted.name}", again, fields, wanted.table)


Redeclare = Callable[[Channel, Mapping[str, Any], Mapping[str, Any]], Awaitable[None]]


async def _differences(
    probe: ProbeChannel, what: str, again: Redeclare, fields: Mapping[str, Any], table: Mapping[str, Any]
) -> list[Difference]:
    """Declare an existing object again, which changes nothing. The server names one difference at a time, so the live
    value takes the place of the wanted one until it names no more."""
    found: list[Difference] = []
    now, arguments = dict(fields), dict(table)
    while len(found) < _MOST_ARGUMENTS:
        refusal = await probe.refusal(lambda channel: again(channel, now, arguments))
        if refusal is None:
            break
        if refusal.code == REFUSED:
            log.warning("%s exists; this user may not configure it, so its arguments were not compared", what)
            break
        difference = of_reply(refusal.text, {**now, **arguments}) if refusal.code == DIFFERS else None
        if difference is None or difference.name in {each.name for each in found}:
            found.append(Difference("it", "as declared", f"not usable: {refusal.text}"))
            break
        found.append(difference)
        place = now if difference.name in now else arguments
        place[difference.name] = difference.live
        if difference.live is None:
            del place[difference.name]
    return found


# -- with the management API ----------------------------------------------------------------------------------------


async def managed(wanted: PlainTopology, management: ManagementApi) -> LiveTopology:
    """Raises ManagementError."""
    exchanges = {name: each for name, each in (await management.exchanges()).items() if name != DEFAULT_EXCHANGE}
    names = sorted(_named(wanted).queues)
    queues = {name: found for name in names if (found := await management.queue(name)) is not None}
    return LiveTopology(
        {name: _live_exchange(each, wanted.exchanges.get(name)) for name, each in exchanges.items()},
        {name: _queue_facts(each, wanted.queues.get(name)) for name, each in queues.items()},
        await management.bindings(),
    )


def _live_exchange(found: Mapping[str, Any], wanted: Exchange | None) -> LiveExchange:
    route = ExchangeRoute(found["type"], found["arguments"].get("alternate-exchange"))
    if wanted is None:
        return LiveExchange((), route)
    fields = {"type": wanted.kind, "durable": wanted.durable, "auto_delete": False, "internal": False}
    live = {name: found[name] for name in fields}
    return LiveExchange([*of_tables(fields, live), *of_tables(wanted.table, found["arguments"])], route)


def _queue_facts(found: Mapping[str, Any], wanted: Queue | None) -> list[Difference]:
    if wanted is None:
        return []
    fields = {"durable": wanted.durable, "auto_delete": False, "exclusive": False}
    live = {name: found[name] for name in fields}
    return [*of_tables(fields, live), *of_tables(wanted.table, found["arguments"])]
