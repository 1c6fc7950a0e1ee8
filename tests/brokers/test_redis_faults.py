"""Errors and silence of the server at every step: publish, receive, settle, store aside, look at the aside, lag,
subscribe, declare. Each step does its work or raises an error that names the thing, the cause and the cure. When the
fault ends, every event that was accepted is handled, in order, and no trouble is left."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from onward.brokers.base import Broker, Filter, State, TopicSpec, Topology
from onward.errors import BrokerError, OnwardError
from onward.testing.aside import make_record
from onward.testing.scenario import Member
from tests.brokers import redis_faults as faults
from tests.brokers.redis_stage import Stage, play, staged
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.servers

LIMIT_S = 25.0  # of one step


async def outcome(step: Awaitable[Any]) -> str:
    """The text of its error; "": it has done its work."""
    try:
        async with asyncio.timeout(LIMIT_S):
            await step
    except OnwardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


async def settled(member: Member, count: int = 5) -> None:
    assert not await member.subscription.settle(member.progress(member.deliveries[:count]))


async def stored_aside(member: Member) -> None:
    (assigned,) = member.assigned.values()
    assert not await member.subscription.settle(
        [], aside=[make_record(member.deliveries[7], assigned.log_id, State.HELD)]
    )


async def every_step(stage: Stage, broker: Broker, member: Member) -> dict[str, str]:
    async def settle_both() -> tuple[str, str]:
        return await outcome(settled(member)), await outcome(stored_aside(member))

    async def received() -> None:
        await member.receive(wait_s=1.0)

    steps = {
        "publish": outcome(broker.publish(stage.events(5, start=10))),
        "publish to a new topic": outcome(broker.publish(Stage(stage.url, stage.client).events(1))),
        "receive": outcome(received()),
        "look aside": outcome(broker.aside(stage.group).scan(Filter(), None, 10)),
        "lag": outcome(member.subscription.lag()),
        "subscribe": outcome(
            broker.subscribe([stage.topic], group="other", member="m", ordering="key", start="latest")
        ),
        "declare": outcome(broker.declare(Topology([TopicSpec(f"{stage.topic}-new", 2)]), apply=True)),
    }
    found, both = await asyncio.gather(asyncio.gather(*steps.values()), settle_both())
    return dict(zip([*steps, "settle", "store aside"], [*found, *both], strict=True))


class FaultCase(NamedTuple):
    name: str  # in redis_faults
    works: frozenset[str]  # steps that do their work nevertheless
    says: str = ""  # in the errors of the others
    options: tuple[str, ...] = ()


_READS = frozenset({"receive", "look aside", "lag"})
_ALL = _READS | {"publish", "publish to a new topic", "subscribe", "declare", "settle", "store aside"}
_AWAY = r"does not answer: .*; is it running"
CASES = [
    FaultCase("busy", frozenset({"receive", "lag"}), "SCRIPT KILL", ("--busy-reply-threshold", "50")),
    FaultCase("read_only", frozenset({"receive", "lag"}), "connect to its master"),
    FaultCase("too_few_replicas", _READS, "lower min-replicas-to-write"),
    FaultCase("out_of_memory", _READS | {"settle"}, "raise maxmemory"),
    FaultCase("full_disk", _READS, "free some space", ("--appendfsync", "everysec")),
    FaultCase("loading", _ALL, "loads its data; wait|ownership is being checked", faults.LOADS_SLOWLY),
    FaultCase("scripts_forgotten", _ALL),
    FaultCase("paused", _ALL),
    FaultCase("writes_paused", _ALL),
    FaultCase("stopped", _ALL),
    FaultCase("killed", frozenset({"receive"}), _AWAY),
]
LONG_CASES = [
    FaultCase("writes_paused_for_long", _ALL, _AWAY),
    FaultCase("stopped_for_long", _ALL, _AWAY),
]


def check(found: dict[str, str], case: FaultCase) -> None:
    for step, text in found.items():
        assert re.search(case.says, text) or (step in case.works and not text), f"{step}: {text or 'worked'}"
        if text and "publish" in step:
            assert text.startswith("PublishError")


async def scene(server: RedisServer, case: FaultCase) -> None:
    async with staged(server, publish_timeout_s=1.5, lease_s=20.0) as stage:
        broker = await stage.broker()
        member = await (await stage.member(broker)).hold(1)
        await broker.publish(stage.events(10))
        await member.take(10)
        before = dict(member.assigned)
        with getattr(faults, case.name)(server):
            found = await every_step(stage, broker, member)
        check(found, case)
        await goes_on(stage, broker, member)
        assert member.assigned == before, "the lease was longer than the fault"


async def goes_on(stage: Stage, broker: Broker, member: Member) -> None:
    """What was stored is handled once and in order, and nothing is left of the fault."""
    await until_done(lambda: settled(member))
    await until_done(lambda: stored_aside(member))
    await until_done(lambda: broker.publish(stage.events(1, start=20)))
    await member.until(lambda: 20 in member.values, 20.0)
    assert member.values == list(dict.fromkeys(member.values))
    assert member.values[:10] == list(range(10))
    assert member.values[-1] == 20
    await until_done(lambda: settled(member, len(member.deliveries)))
    (record,) = (await broker.aside(stage.group).scan(Filter(), None, 10)).records
    assert record.position == member.deliveries[7].position
    await member.until(lambda: not member.subscription.troubles(), 20.0)
    (lag,) = (await member.subscription.lag()).values()
    assert lag.undelivered == 0
    later = await Member.join(broker, stage.topic, "later")
    await later.until(lambda: len(later.assigned) == 1, 20.0)


async def until_done(step: Callable[[], Awaitable[Any]]) -> None:
    """The same step again until it is done, as the consumer and a publisher do."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await step()
            except BrokerError:
                await asyncio.sleep(0.1)
            else:
                return


def play_case(case: FaultCase, kind: type[RedisServer] = faults.LimitedServer) -> None:
    server = kind(*case.options)
    try:
        server.start()
        play(scene(server, case))
    finally:
        server.close()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_fault_at_every_step_is_named_and_loses_nothing(case: FaultCase) -> None:
    play_case(case)


@pytest.mark.more
@pytest.mark.parametrize("case", LONG_CASES, ids=[case.name for case in LONG_CASES])
def test_a_long_silence_at_every_step_is_named_and_loses_nothing(case: FaultCase) -> None:
    play_case(case)


@pytest.mark.more
@pytest.mark.parametrize("kind", [faults.LimitedOldServer, faults.LimitedValkey])
@pytest.mark.parametrize("name", ["read_only", "too_few_replicas", "out_of_memory", "full_disk", "scripts_forgotten"])
def test_errors_of_other_versions_are_named_too(name: str, kind: type[RedisServer]) -> None:
    (case,) = [case for case in CASES if case.name == name]
    play_case(case, kind)
