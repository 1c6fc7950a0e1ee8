"""Supervised members on Kafka: what a kill costs, which member is fenced, and that a clean stop leaves no member.

`pytest -s` prints how long the keys of a killed member wait; -m "slow or more" also measures members without a slot.
"""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onward.brokers.base import Broker, Fenced, MemberInfo, Progress, Supervised
from onward.brokers.kafka import commit_metadata
from onward.brokers.kafka.commit_metadata import Committed, LogBounds, TextLimit
from onward.brokers.kafka.group_consumer import instance_id
from onward.brokers.kafka.owner_marks import OwnerMarks, TakeoverWait
from onward.clock import now
from onward.errors import BadSetting
from onward.event import Partition
from onward.testing.failure_shop import eventually
from onward.testing.scenario import Kit, Member, Process, event, first_times, whole_lines
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import Stage, play, staged, until
from tests.brokers.test_kafka_leaving import SESSION_S, set_session

__all__ = ["harness"]

KEYS = 50
NO_MEMBERS: frozenset[str] = frozenset()
PLACE = Partition("topic", 0)


class SlotProcess(Process):
    """A member process. `up` is done when it reports that it runs."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__([str(Path(__file__).with_name("kafka_member.py")), json.dumps(task)])
        self.up = asyncio.ensure_future(self.line(60.0))
        self.up.add_done_callback(lambda up: up.cancelled() or up.exception())  # a killed process may never report


class Slots:
    """Processes of one group that a supervisor starts and that a test kills. Each fills a slot, unless `named` is
    False."""

    def __init__(self, kit: Kit, *, named: bool = True, run_s: float = 0.005) -> None:
        self.effects = kit.harness.folder / f"effects-{uuid4().hex[:8]}"
        self.log = kit.harness.folder / "log"
        self._kit = kit
        self._named = named
        self._run_s = run_s
        self._started: dict[str, list[SlotProcess]] = {}

    def start(self, slot: str, gone: int | None = None) -> SlotProcess:
        """Start the next process of the slot. It knows that the first `gone` of its predecessors have ended (default:
        all)."""
        before = self._started.setdefault(slot, [])
        names = [f"{slot}-{n}" for n in range(len(before) + 1)]
        task: dict[str, Any] = {"url": self._kit.harness.url, "settings": self._kit.options, "topic": self._kit.topic}
        task |= {"group": "group", "effects": str(self.effects), "run_s": self._run_s, "log": str(self.log)}
        if self._named:
            task |= {"slot": f"{self._kit.topic}-{slot}", "member": names.pop(), "gone": names[:gone]}
        process = SlotProcess(task)
        before.append(process)
        self._kit.adopt(process)
        return process

    async def replace(self, slot: str) -> None:
        """Wait until the slot's process is a member, kill -9 it, and start the next one at once."""
        await self._started[slot][-1].up
        self._started[slot][-1].kill()
        self.start(slot)

    def lines(self) -> list[tuple[str, int, int]]:
        """Key, number and fence of every run that ended, in order."""
        return [(key, int(n), int(fence)) for key, n, _, fence in map(str.split, whole_lines(self.effects))]

    def done(self) -> list[tuple[str, int]]:
        return [(key, n) for key, n, _ in self.lines()]


@asynccontextmanager
async def kit_of(harness: KafkaHarness, **options: object) -> AsyncIterator[Kit]:
    kit = Kit(harness, options)
    try:
        yield kit
    finally:
        await kit.close()


async def publish(kit: Kit, count: int) -> None:
    broker = await kit.broker()
    for first in range(0, count, 1_000):
        numbers = range(first, min(count, first + 1_000))
        await broker.publish([event(kit.topic, f"key-{n % KEYS}", n // KEYS) for n in numbers])


# -- what a kill costs ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_members_in_slots_go_on_while_one_of_three_is_killed_every_two_seconds(harness: KafkaHarness) -> None:
    count, kills, every_s = 20_000, 10, 2.0

    async def scene() -> None:
        async with kit_of(harness, partitions=12, lease_s=10.0, takeover_grace_s=1.0) as kit:
            await publish(kit, count)
            slots = Slots(kit, run_s=0.05)
            for slot in "abc":
                slots.start(slot)
            await until(lambda: len(slots.done()) > KEYS)
            before, began = len(set(slots.done())), now()
            for n in range(kills):
                await slots.replace("abc"[n % 3])
                await asyncio.sleep(every_s)
                if n == kills // 2:
                    midway = len(set(slots.done()))
            handled, took_s = len(set(slots.done())), now() - began
            assert handled == count or handled > midway + 500, f"{midway}, then {handled} of {count} were handled"
            await until(lambda: len(set(slots.done())) == count, within_s=90.0)
            done = slots.done()
            assert first_times(done) == {f"key-{k}": list(range(count // KEYS)) for k in range(KEYS)}
            rate, repeated = (handled - before) / took_s, len(done) - count
            print(f"\n{rate:.0f} events/s while a member is killed every {every_s:g} s, {repeated} repeated")  # noqa: T201

    play(scene())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("protocol", "named", "rounds"),
    [
        pytest.param("classic", True, 8, marks=pytest.mark.slow, id="slot"),
        pytest.param("classic", False, 4, marks=pytest.mark.more, id="dynamic"),
        pytest.param("consumer", False, 3, marks=pytest.mark.more, id="consumer"),
    ],
)
def test_how_long_the_keys_of_a_killed_member_wait(
    harness: KafkaHarness, protocol: str, named: bool, rounds: int
) -> None:
    lease_s = 10.0

    async def scene() -> None:
        options = {"lease_s": lease_s, "takeover_grace_s": 1.0, "client": {"group.protocol": protocol}}
        async with kit_of(harness, **options) as kit:
            slots, pauses = Slots(kit, named=named), []
            broker = await kit.broker()
            slots.start("a")
            for n in range(rounds + 1):
                began = now()
                await broker.publish([event(kit.topic, f"key-{k}", n) for k in range(KEYS)])
                pauses.append([at - began for at in await _handled_at(slots, n)])
                await eventually(lambda: _is_settled(broker, kit.topic), "all events are settled", 30.0)
                await slots.replace("a")
            found = [pause for each in pauses[1:] for pause in each]
            median, worst = statistics.median(found), max(found)
            print(f"\nkill -9 to a key's next event: median {median:.1f} s, worst {worst:.1f} s")  # noqa: T201
            assert not named or median < lease_s / 2

    play(scene())


async def _handled_at(slots: Slots, n: int) -> list[float]:
    """When event n of each key was handled."""
    at: dict[str, float] = {}

    def look() -> bool:
        for key, number in slots.done():
            if number == n:
                at.setdefault(key, now())
        return len(at) == KEYS

    await until(look, within_s=90.0)
    return list(at.values())


async def _is_settled(broker: Broker, topic: str) -> bool:
    """An unsettled event may have been running when its process died. So it runs alone again, which takes time."""
    (info,) = await broker.groups(topic)
    return all(standing.watermark == standing.end for standing in info.partitions.values())


# -- fenced members ---------------------------------------------------------------------------------------------------


def test_a_slot_that_is_filled_twice_fences_its_first_member(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, partitions=4, lease_s=6.0) as stage:
            await stage.publish(8, keys=8)
            first = await stage.member(supervised=Supervised("slot-1", "first"))
            await first.take(8)
            held = dict(first.assigned)
            began = now()
            second = await stage.member(supervised=Supervised("slot-1", "second"))
            await until(lambda: first.subscription.sure_until() < now())
            assert not second.assigned, "the first one must be unsure before another member owns its partitions"
            unsettled = first.progress()
            assert {*await first.subscription.settle(unsettled)} == {*held}
            await first.until(lambda: not first.assigned)
            assert [message for message in first.history if isinstance(message, Fenced)]
            with pytest.raises(BadSetting, match=r"another process has joined as slot-1\.[0-9a-f]+.*stop one"):
                await first.receive()
            await second.take(8)
            assert now() - began > 6.0, "the second one did not wait for the session of the first"
            await first.subscription.close()
            assert not await second.settle()

    play(scene())


@pytest.mark.slow
def test_a_suspended_process_that_resumes_after_its_successor_joined_starts_nothing(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with kit_of(harness, lease_s=6.0, takeover_grace_s=1.0) as kit:
            await publish(kit, 4_000)
            slots = Slots(kit, run_s=0.05)
            first = slots.start("a")
            await until(lambda: len(slots.done()) > KEYS)
            first.stop()
            theirs = {fence for *_, fence in slots.lines()}
            slots.start("a", gone=0)
            await until(lambda: any(fence not in theirs for *_, fence in slots.lines()))
            taken_over = len(slots.lines())
            first.go_on()
            await until(lambda: "another process has joined as" in slots.log.read_text())
            await until(lambda: len(set(slots.done())) == 4_000, within_s=60.0)
            late = [key for key, _, fence in slots.lines()[taken_over:] if fence in theirs]
            assert len(late) == len(set(late)), "only the suspended run of each key may go on"
            assert first_times(slots.done()) == {f"key-{k}": list(range(80)) for k in range(KEYS)}

    play(scene())


@pytest.mark.slow
def test_if_a_member_is_killed_while_it_waits_its_successor_waits_too(harness: KafkaHarness) -> None:
    """The third member knows that the second has ended, but not the first, whose session may go on."""

    async def scene() -> None:
        async with staged(harness, lease_s=6.0) as stage:
            await stage.publish(1)
            await _killed(stage, "slot-1", "first")
            second = await stage.member(supervised=Supervised("slot-1", "second"))
            await until(lambda: _owner(stage) == TakeoverWait.SESSION)
            assert not second.assigned
            await second.subscription.close()
            began = now()
            third = await stage.member(supervised=Supervised("slot-1", "third", frozenset({"second"})))
            await third.take(1)
            assert now() - began > 6.0

    play(scene())


async def _killed(stage: Stage, slot: str, name: str) -> None:
    """Start a member that owns all partitions, and kill it."""
    task = {"mode": "hold", "slot": slot, "member": name, "topic": stage.topic, "group": stage.group}
    child = Process(
        ["-m", "onward.testing.member", json.dumps(task | {"url": stage.harness.url, "settings": stage.options})]
    )
    try:
        while (await child.line())["report"] != "Delivery":
            pass
    finally:
        child.end()


def _owner(stage: Stage) -> str:
    offset, text = stage.committed()[0]
    return commit_metadata.read(text, offset).owner


# -- the group --------------------------------------------------------------------------------------------------------


def test_a_clean_stop_leaves_no_member_behind_and_the_next_one_is_named_by_its_slot(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, lease_s=25.0) as stage:
            await stage.publish(1)
            broker = await stage.broker()
            for name in ("first", "second"):
                member = await stage.member(supervised=Supervised("slot-1", name))
                await member.hold(1)
                (info,) = await broker.groups(stage.topic)
                assert list(info.members) == [MemberInfo("slot-1")]
                await member.release(list(member.assigned))
                await member.subscription.close()
                (info,) = await broker.groups(stage.topic)
                assert not list(info.members)

    play(scene())


def test_a_member_is_still_named_by_its_slot_after_a_kill(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, lease_s=25.0) as stage:
            await stage.publish(1)
            await _killed(stage, "slot-1", "first")
            member = await stage.member(supervised=Supervised("slot-1", "second", frozenset({"first"})))
            await member.hold(1)
            (info,) = await (await stage.broker()).groups(stage.topic)
            assert list(info.members) == [MemberInfo("slot-1")]
            assert info.partitions[0].owner == "slot-1"

    play(scene())


def test_one_process_can_have_two_handlers_of_one_group(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness, lease_s=25.0) as stage:
            await stage.publish(1)
            broker, slot = await stage.broker(), Supervised("slot-1", "first")
            await broker.publish([event(f"{stage.topic}-too", "key", 0)])
            one = await stage.member(broker, supervised=slot)
            two = await Member.join(broker, f"{stage.topic}-too", stage.group, supervised=slot)
            while not (one.deliveries and two.deliveries):
                await asyncio.gather(one.receive(), two.receive())

    play(scene())


@pytest.mark.slow
def test_a_supervised_member_of_a_modern_group_waits_for_the_session(harness: KafkaHarness) -> None:
    """A static member of such a group cannot come back before its session has ended, so Onward uses no slots."""

    async def scene() -> None:
        async with staged(harness, client={"group.protocol": "consumer"}, takeover_grace_s=30.0) as stage:
            set_session(harness, stage.group)
            await stage.publish(1)
            await _killed(stage, "slot-1", "first")
            began = now()
            member = await stage.member(supervised=Supervised("slot-1", "second", frozenset({"first"})))
            await member.take(1)
            assert SESSION_S / 2 < now() - began < 30.0, "the session counts, the grace does not"

    play(scene())


# -- marks (pure) -----------------------------------------------------------------------------------------------------


def test_what_an_owner_waits_for() -> None:
    first, other = _marks("first", "slot-1"), _marks("other", "slot-2")
    dynamic = _marks("dynamic", "")
    second = OwnerMarks("second", instance="slot-1", gone=NO_MEMBERS)
    knowing = OwnerMarks("third", instance="slot-1", gone=frozenset({"first"}))
    assert second.wait(first.mine) is TakeoverWait.SESSION, "the slot was handed over, and the first session may go on"
    assert knowing.wait(first.mine) is TakeoverWait.NONE
    for mark in (other.mine, dynamic.mine, second.mine, TakeoverWait.GRACE, "", "nonsense"):
        assert second.wait(mark) is TakeoverWait.GRACE, mark
        assert _marks("another", "").wait(mark) is TakeoverWait.GRACE, mark
    for member in (second, knowing, dynamic):
        assert member.wait(TakeoverWait.SESSION) is TakeoverWait.SESSION
    assert _marks("more", "").wait(dynamic.mine) is TakeoverWait.GRACE, "dynamic members share no slot"


def _marks(member: str, instance: str) -> OwnerMarks:
    return OwnerMarks(member, instance=instance, gone=NO_MEMBERS)


@pytest.mark.parametrize("owner", ["", "?", _marks("first", "slot-1").mine])
def test_a_commit_names_its_owner(owner: str) -> None:
    suffix = commit_metadata.suffix_of("log", 4)
    smallest = TextLimit(63, "bytes")
    for limit in (TextLimit(), smallest):
        text, _ = commit_metadata.write(
            Progress(PLACE, 1, 5), 1 << 41, clean=True, owner=owner, suffix=suffix, limit=limit
        )
        found = commit_metadata.read(text, 5)
        assert (found.owner, found.log_id, found.partitions) == (owner, "log", 4)
        assert (found.progress.fence, found.progress.clean) == (1 << 41, True)


def test_a_commit_of_an_earlier_version_names_no_owner() -> None:
    suffix = commit_metadata.suffix_of("log", 4)
    text, _ = commit_metadata.write(Progress(PLACE, 1, 5), 3, clean=False, owner="x", suffix=suffix, limit=TextLimit())
    found = commit_metadata.read(text.replace(".x.", "."), 5)
    assert (found.owner, found.log_id, found.partitions, found.progress.fence) == ("", "log", 4, 3)


@pytest.mark.parametrize("slot", ["web-1", "a" * 500, "Büro/7:two", ".."])
def test_the_instance_id_of_a_slot_is_legal_and_its_own(slot: str) -> None:
    name = instance_id(slot, ["orders"])
    assert len(name) <= 249
    assert all(char.isascii() and (char.isalnum() or char in "._-") for char in name)
    assert name == instance_id(slot, ["orders"])
    assert len({name, instance_id(slot, ["payments"]), instance_id(f"{slot}x", ["orders"])}) == 3


def test_a_start_point_names_the_last_owner() -> None:
    suffix = commit_metadata.suffix_of("log", 1)
    text, _ = commit_metadata.write(Progress(PLACE, 1, 5), 3, clean=False, owner="x", suffix=suffix, limit=TextLimit())
    point = commit_metadata.start_point(PLACE, Committed(5, text), LogBounds("log", 0, 9, 0), began_with=1)
    assert (point.owner, point.unclean) == ("x", True)
