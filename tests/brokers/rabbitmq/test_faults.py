"""Connections that are cut in the middle of a step, on a real server. Nothing that was accepted is lost, nothing
runs out of order, and the application recovers by itself."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from onward.errors import OnwardError
from tests.brokers.rabbitmq.cutting_proxy import ACK, CONSUME, CONSUME_OK, DELIVER, PUBLISH, CuttingProxy, Frame
from tests.brokers.rabbitmq.fault_shop import FaultShop, some_fail, until
from tests.servers.rabbitmq import RabbitMQServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COPY = "\x0donward.orders"  # the exchange of the topic, with its length before it
STREAM = "\x0fonward.orders."  # the name of a stream, in the same way


def sent(method: tuple[int, int], text: str = "") -> Callable[[Frame], bool]:
    return lambda frame: frame.from_client and frame.method == method and frame.has(text)


def received(method: tuple[int, int], text: str = "") -> Callable[[Frame], bool]:
    return lambda frame: not frame.from_client and frame.method == method and frame.has(text)


# Where a connection is cut: the frame, whether it still arrives, and whether it is only sent after a reconnect.
COMMON = {
    "publish, not stored": (sent(PUBLISH, STREAM), False, False),
    "publish, stored": (sent(PUBLISH, STREAM), True, False),
    "confirm": (received(ACK), False, False),
    "consume": (sent(CONSUME), False, True),
    "consume-ok": (received(CONSUME_OK), False, True),
    "ack, lost": (sent(ACK), False, False),
    "ack, arrived": (sent(ACK), True, False),
    "record, not stored": (sent(PUBLISH, ".aside."), False, False),
    "record, stored": (sent(PUBLISH, ".aside."), True, False),
}
STEPS = {
    "ordered": COMMON
    | {
        "delivery": (received(DELIVER, STREAM), False, False),
        "token, not stored": (sent(PUBLISH, ".token"), False, False),
        "token, stored": (sent(PUBLISH, ".token"), True, False),
        "token, back": (received(DELIVER, ".token"), False, False),
        "claim": (sent(PUBLISH, ".token"), True, True),
        "presence": (sent(PUBLISH, ":members"), False, False),
    },
    "work": COMMON
    | {
        "copy, not stored": (sent(PUBLISH, COPY), False, False),
        "copy, stored": (sent(PUBLISH, COPY), True, False),
        "delivery": (received(DELIVER, COPY), False, False),
        "retry, not stored": (sent(PUBLISH, ".rung."), False, False),
        "retry, stored": (sent(PUBLISH, ".rung."), True, False),
    },
}


@pytest.fixture
def vhost(rabbitmq_server: RabbitMQServer) -> Iterator[str]:
    with rabbitmq_server.vhost() as name:
        yield name


@pytest.mark.parametrize("kind", STEPS)
def test_a_connection_cut_at_any_step_loses_and_inverts_nothing(
    rabbitmq_server: RabbitMQServer, vhost: str, kind: str
) -> None:
    async def scene(proxy: CuttingProxy) -> None:
        async with FaultShop(rabbitmq_server.url_of(vhost, proxy.url), kind, some_fail).open() as shop:
            await shop.publish()
            for name, (step, delivered, on_reconnect) in STEPS[kind].items():
                proxy.cut_at(step, delivered=delivered)
                if on_reconnect:
                    proxy.cut()
                    proxy.mend()
                await published_until(lambda: proxy.has_cut, shop, f"cut at: {name}")
                await shop.publish()
                try:
                    await shop.settled()
                except AssertionError as error:
                    raise AssertionError(f"after the cut at: {name}") from error

    with CuttingProxy(rabbitmq_server) as proxy:
        asyncio.run(scene(proxy))


async def published_until(condition: Callable[[], bool], shop: FaultShop, what: str) -> None:
    """Publish a few events at a time until the condition holds."""
    for _ in range(300):
        await shop.publish(2)
        await asyncio.sleep(0.05)
        if condition():
            return
    raise AssertionError(f"not: {what}")


REPLAY_STEPS = {
    "ordered": {
        "request, not stored": (sent(PUBLISH, ".aside."), False),
        "request, stored": (sent(PUBLISH, ".aside."), True),
    },
    "work": {
        "request, not stored": (sent(PUBLISH, ".aside."), False),
        "request, stored": (sent(PUBLISH, ".aside."), True),
        "event, not stored": (sent(PUBLISH, "billing:work"), False),
        "event, stored": (sent(PUBLISH, "billing:work"), True),
    },
}


@pytest.mark.parametrize("kind", REPLAY_STEPS)
def test_a_connection_cut_during_a_replay_loses_no_letter(
    rabbitmq_server: RabbitMQServer, vhost: str, kind: str
) -> None:
    """The application and the operator use the same connections."""

    async def scene(proxy: CuttingProxy) -> None:
        async with FaultShop(rabbitmq_server.url_of(vhost, proxy.url), kind, some_fail).open() as shop:
            for name, (step, delivered) in REPLAY_STEPS[kind].items():
                shop.cured = False
                await shop.publish(50)
                await shop.settled()
                shop.cured = True
                proxy.cut_at(step, delivered=delivered)
                await replayed(shop)
                await until(lambda: proxy.has_cut, f"cut at: {name}", shop)
                await replayed(shop)
                await shop.settled()
            await no_letters(shop)

    with CuttingProxy(rabbitmq_server) as proxy:
        asyncio.run(scene(proxy))


async def replayed(shop: FaultShop) -> None:
    """Replay all letters, again after an error, as an operator does."""
    for _ in range(20):
        try:
            if not (await shop.app.dead.replay()).left:
                return
        except OnwardError:
            await asyncio.sleep(0.2)
    raise AssertionError("the replay fails again and again")


async def no_letters(shop: FaultShop) -> None:
    for _ in range(600):
        if not await shop.letters():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"letters are left: {sorted(await shop.letters())}")
