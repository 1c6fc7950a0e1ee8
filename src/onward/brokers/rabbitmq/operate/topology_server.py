"""Creates what the server lacks of a declared topology."""

import logging
from collections.abc import Awaitable, Callable

from onward.brokers.base import Change
from onward.brokers.rabbitmq.amqp import Channel, Connection
from onward.brokers.rabbitmq.operate.live_topology import asked, managed
from onward.brokers.rabbitmq.operate.management import ManagementApi, ManagementError
from onward.brokers.rabbitmq.operate.probe_channel import ProbeChannel
from onward.brokers.rabbitmq.operate.topology import Binding, Declared, Exchange, PlainTopology, Queue
from onward.brokers.rabbitmq.operate.topology_plan import LiveTopology, TopologyPlan, planned

log = logging.getLogger("onward")

_NOT_COMPARED = (
    "%s not compared: RabbitMQ lists bindings only over its management API (client setting management_url). "
    "`onward topology apply` binds again what is declared, which changes nothing if the binding exists"
)

Question = Callable[[Channel], Awaitable[object]]


async def declare(
    connection: Connection,
    declared: Declared,
    *,
    apply: bool,
    compare: bool = True,
    management: ManagementApi | None = None,
) -> list[Change]:
    """The differences of the server from the topology. With `apply`, what is missing is created.

    Without `management` the server can list no bindings, and with `compare` off it is only asked whether objects
    exist."""
    wanted = declared.plain()
    if not (wanted.exchanges or wanted.queues or wanted.bindings):
        return []
    probe = ProbeChannel(connection)
    try:
        plan = planned(wanted, await _live(wanted, probe, management, compare=compare or apply))
        if apply:
            return await _applied(plan, probe)
        if plan.again:
            log.info(_NOT_COMPARED, "1 binding" if len(plan.again) == 1 else f"{len(plan.again)} bindings")
        return plan.changes
    finally:
        await probe.close()


async def _live(
    wanted: PlainTopology, probe: ProbeChannel, management: ManagementApi | None, *, compare: bool
) -> LiveTopology:
    if management is not None:
        try:
            return await managed(wanted, management)
        except ManagementError as error:
            log.warning("comparing the topology without the management API: %s", error)
    return await asked(wanted, probe, compare=compare)


async def _applied(plan: TopologyPlan, probe: ProbeChannel) -> list[Change]:
    refused: dict[str, Change] = {}
    for what, question in _questions(plan):
        if (refusal := await probe.refusal(question)) is not None:
            refused[what] = Change(what, "refuse", f"{what}: RabbitMQ refused it: {refusal.text}")
    return [*(each for each in plan.changes if each.what not in refused), *refused.values()]


def _questions(plan: TopologyPlan) -> list[tuple[str, Question]]:
    return [
        *((f"exchange {each.name}", _new_exchange(each)) for each in plan.exchanges),
        *((f"queue {each.name}", _new_queue(each)) for each in plan.queues),
        *((str(each), _bound(each)) for each in (*plan.bindings, *plan.again)),
    ]


def _new_exchange(exchange: Exchange) -> Question:
    name, kind, durable, table = exchange.name, exchange.kind, exchange.durable, exchange.table
    return lambda channel: channel.declare_exchange(name, kind, durable=durable, arguments=table)


def _new_queue(queue: Queue) -> Question:
    name, durable, table = queue.name, queue.durable, queue.table
    return lambda channel: channel.declare_queue(name, durable=durable, arguments=table)


def _bound(binding: Binding) -> Question:
    target, exchange, key, table = binding.target, binding.exchange, binding.key, binding.arguments
    if binding.queue:
        return lambda channel: channel.bind_queue(target, exchange, key, table)
    return lambda channel: channel.bind_exchange(target, exchange, key, table)
