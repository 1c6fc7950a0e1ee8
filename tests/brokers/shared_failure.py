"""The failure suite without order, for brokers with shared partitions: the promises of onward.testing.FailureSuite that
do not depend on the order of keys. A shared partition may have no history, so each group exists before the events."""

import asyncio
import time
from collections.abc import Collection
from typing import Any

import pytest

from onward import GiveUp, RetryLater, Skip
from onward.brokers.base import State
from onward.testing.failure_shop import (
    GROUP,
    FailureMember,
    FailureShop,
    Handle,
    eventually,
    fine,
    none_left,
    publish,
    until,
)
from onward.testing.scenario import Kit, scenario

UNORDERED = {"ordering": "none", "start": "latest"}
Event = tuple[str, int]  # its key and number


class UnorderedShop(FailureShop):
    def __init__(self, kit: Kit, handle: Handle, **options: Any) -> None:
        super().__init__(kit, handle, **(UNORDERED | options))


async def found(kit: Kit) -> None:
    """Create the group."""
    async with UnorderedShop(kit, fine).open() as shop:
        await until(lambda: shop.app.health().ready, "the application is ready")


async def has_dead(shop: FailureShop, count: int) -> bool:
    """Whether so many events are dead letters. A broker may show retries as records, too."""
    return len(await shop.records(State.DEAD)) == count


async def is_settled(shop: FailureShop, worker: FailureMember) -> bool:
    """Whether there is a dead letter before the worker dies."""
    while worker.runs:
        if await has_dead(shop, 1):
            return True
        await asyncio.sleep(0.05)
    return await has_dead(shop, 1)


def every(keys: Collection[str], count: int) -> list[Event]:
    return sorted((key, n) for key in keys for n in range(count))


class UnorderedEndScenarios:
    """How an event ends: attempts used up, success after retries, decided by the handler, undecodable, expired."""

    @scenario()
    async def test_an_event_that_used_up_its_attempts_becomes_a_dead_letter(self, kit: Kit) -> None:
        async def handle(key: str, n: int) -> None:
            if (key, n) == ("a", 1):
                raise ValueError(f"no stock for {n}")

        await found(kit)
        before = time.time()
        await publish(kit, {"a": range(4), "b": range(4)})
        async with UnorderedShop(kit, handle).open() as shop:
            await until(lambda: len(shop.done) == 7, "all events but one are handled")
            await eventually(lambda: has_dead(shop, 1), "there is a dead letter")
            (letter,) = await shop.records(State.DEAD)
        assert sorted(shop.done) == [each for each in every("ab", 4) if each != ("a", 1)]
        assert shop.tried.count(("a", 1)) == 3
        assert letter.state is State.DEAD
        assert (letter.event.key, letter.event.value) == ("a", b'{"n":1}')
        failure = letter.failure
        assert failure is not None
        assert (failure.reason, failure.error, failure.message) == ("exhausted", "ValueError", "no stock for 1")
        assert failure.attempts == 3
        assert before <= failure.first <= failure.last, "the times of the first and the last failure"

    @scenario()
    async def test_events_that_succeed_after_retries_are_handled_once(self, kit: Kit) -> None:
        async def handle(key: str, n: int) -> None:
            if n % 3 == 1 and shop.tried.count((key, n)) < 3:
                raise ConnectionError("the bank is closed")

        await found(kit)
        await publish(kit, {key: range(6) for key in "abcd"})
        async with UnorderedShop(kit, handle).open() as shop:
            await until(lambda: len(shop.done) >= 24, "all events are handled")
            assert not await shop.records()
        assert sorted(shop.done) == every("abcd", 6)
        assert len(shop.tried) == 24 + 2 * 8

    @scenario()
    async def test_a_handler_can_skip_give_up_or_retry_later(self, kit: Kit) -> None:
        async def handle(key: str, n: int) -> None:
            match n:
                case 0:
                    raise Skip("nothing to do")
                case 1:
                    raise GiveUp("no such customer")
                case 2 if shop.tried.count((key, n)) == 1:
                    raise RetryLater(0.2)

        await found(kit)
        await publish(kit, {"a": range(4)})
        async with UnorderedShop(kit, handle).open() as shop:
            await until(lambda: sorted(shop.of("a")) == [2, 3], "the other events are handled")
            await eventually(lambda: has_dead(shop, 1), "there is a dead letter")
            (letter,) = await shop.records(State.DEAD)
        assert sorted(shop.tried) == [("a", 0), ("a", 1), ("a", 2), ("a", 2), ("a", 3)]
        assert letter.failure is not None
        assert (letter.failure.reason, letter.failure.message) == ("refused", "no such customer")

    @scenario()
    async def test_an_undecodable_event_is_a_dead_letter_at_once_with_its_raw_value(self, kit: Kit) -> None:
        await found(kit)
        shop = UnorderedShop(kit, fine)
        async with shop.open():
            await shop.app.publish(kit.topic, b"\xff no json", key="a", headers={"origin": "shell"})
            await shop.app.publish(kit.topic, {"n": 1}, key="a")
            await until(lambda: shop.of("a") == [1], "the other event is handled")
            await eventually(lambda: has_dead(shop, 1), "there is a dead letter")
            (letter,) = await shop.records(State.DEAD)
        assert (letter.event.value, letter.event.headers) == (b"\xff no json", {"origin": "shell"})
        assert letter.failure is not None
        assert (letter.failure.reason, letter.failure.attempts) == ("undecodable", 1)

    @scenario()
    async def test_an_expired_event_becomes_a_dead_letter_when_its_turn_comes(self, kit: Kit) -> None:
        await found(kit)
        async with UnorderedShop(kit, fine).app as app:
            for n, expires_s in enumerate([None, 0.2, 600.0]):
                await app.publish(kit.topic, {"n": n}, key="a", expires_s=expires_s)
        await asyncio.sleep(0.3)  # it expires while the group has no member
        async with UnorderedShop(kit, fine).open() as shop:
            await until(lambda: sorted(shop.of("a")) == [0, 2], "the other events are handled")
            await eventually(lambda: has_dead(shop, 1), "there is a dead letter")
            (letter,) = await shop.records(State.DEAD)
        assert ("a", 1) not in shop.tried
        assert letter.failure is not None
        assert (letter.failure.reason, letter.failure.attempts) == ("expired", 0)


class UnorderedStoreScenarios:
    """For a harness with `refuse_aside`."""

    @scenario()
    async def test_while_a_record_cannot_be_stored_its_event_stays_open_and_readiness_ends(self, kit: Kit) -> None:
        async def handle(_: str, n: int) -> None:
            if n == 0:
                raise GiveUp("never")

        harness: Any = kit.harness
        await found(kit)
        shop = UnorderedShop(kit, handle)
        async with shop.open():
            await until(lambda: shop.app.health().ready, "the application is ready")
            with harness.refuse_aside():
                await publish(kit, {"a": range(3)})
                await until(lambda: sorted(shop.of("a")) == [1, 2], "the other events are handled")
                await until(lambda: not shop.app.health().ready, "readiness ends")
                await until(lambda: "set aside" in " ".join(shop.app.health().troubles), "the reason is named")
                assert not await shop.records()
            await eventually(lambda: has_dead(shop, 1), "the dead letter is stored")
            await until(lambda: shop.app.health().ready, "readiness recovers")
        assert sorted(shop.of("a")) == [1, 2], "an event ran twice"

    @scenario()
    async def test_a_retry_that_cannot_be_stored_is_not_lost(self, kit: Kit) -> None:
        async def handle(key: str, n: int) -> None:
            if n == 0 and shop.tried.count((key, n)) == 1:
                raise RetryLater(12.0)  # a broker may keep a short wait in memory

        harness: Any = kit.harness
        await found(kit)
        shop = UnorderedShop(kit, handle)
        async with shop.open():
            with harness.refuse_aside():
                await publish(kit, {"a": range(3)})
                await until(lambda: sorted(shop.of("a")) == [1, 2], "the other events are handled")
                await until(lambda: not shop.app.health().ready, "readiness ends")
            await until(lambda: sorted(shop.of("a")) == [0, 1, 2], "the retry is handled")


class UnorderedReplayScenarios:
    @scenario()
    async def test_another_application_can_replay_while_the_group_runs_and_while_it_does_not(self, kit: Kit) -> None:
        cured = False

        async def handle(_: str, n: int) -> None:
            if n < 3 and not cured:
                raise ValueError("not yet")

        await found(kit)
        await publish(kit, {"a": range(5), "b": range(5)})
        async with UnorderedShop(kit, handle).open() as shop:
            await until(lambda: len(shop.done) == 4, "the other events are handled")
            await eventually(lambda: has_dead(shop, 6), "six events are dead letters")
        other = UnorderedShop(kit, handle)
        async with other.app as app:
            assert (await app.dead.replay(key="a", dry_run=True)).replayed == 3
            answer = await app.dead.replay(key="a")
        assert (answer.replayed, answer.failed, answer.left) == (3, 0, 0)
        cured = True
        second = UnorderedShop(kit, handle)
        async with second.open():
            await until(
                lambda: sorted(second.of("a")) == [0, 1, 2], "the replayed events are handled when the group runs again"
            )
            async with other.app as app:
                answer = await app.dead.replay(topic=kit.topic)
            assert (answer.replayed, answer.failed, answer.left) == (3, 0, 0)
            await until(
                lambda: sorted(second.of("b")) == [0, 1, 2], "the replayed events are handled while the group runs"
            )
            await eventually(none_left(second), "the records are removed")
        assert len(second.done) == 6, "an event ran twice, or one ran that was not replayed"

    @scenario()
    async def test_concurrent_replays_run_no_event_twice(self, kit: Kit) -> None:
        cured = False

        async def handle(_: str, __: int) -> None:
            if not cured:
                raise GiveUp("never")

        await found(kit)
        await publish(kit, {f"k{k}": range(20) for k in range(10)})
        shop = UnorderedShop(kit, handle)
        async with shop.open():
            await eventually(lambda: has_dead(shop, 200), "all events are dead letters")
            cured = True
            others = [UnorderedShop(kit, handle).app for _ in range(2)]
            async with others[0] as one, others[1] as two:
                answers = await asyncio.gather(*(app.dead.replay(group=GROUP) for app in (one, two, shop.app)))
            assert sum(answer.replayed for answer in answers) == 200
            await until(lambda: len(shop.done) >= 200, "all events are handled")
            await eventually(none_left(shop), "the records are removed")
        assert sorted(shop.done) == every([f"k{k}" for k in range(10)], 20)


class UnorderedCrashScenarios:
    """For a broker that other processes can open."""

    @pytest.mark.slow
    @scenario()
    async def test_a_replay_killed_at_any_step_loses_and_repeats_no_event(self, kit: Kit) -> None:
        async def fail(_: str, __: int) -> None:
            raise GiveUp("never")

        await found(kit)
        await publish(kit, {"a": range(30), "b": range(30)})
        async with UnorderedShop(kit, fail).open() as shop:
            await eventually(lambda: has_dead(shop, 60), "all events are dead letters")
        cured = UnorderedShop(kit, fine)
        async with cured.open():
            for moved, delay_s in ((0, 0.0), (0, 0.004), (5, 0.0), (9, 0.004)):
                replaying = FailureMember(kit, {"mode": "replay", "rate": 100})
                while (await replaying.line()).get("replayed", -1) < moved:
                    pass
                await asyncio.sleep(delay_s)
                replaying.end()
            await cured.app.dead.replay()
            await until(lambda: len(cured.done) >= 60, "all events are handled")
            await eventually(none_left(cured), "the records are removed")
        assert sorted(cured.done) == every("ab", 30)

    @pytest.mark.slow
    @scenario(max_poll_gap_s=3.0)
    async def test_a_worker_killed_during_a_replay_loses_no_event(self, kit: Kit) -> None:
        async def fail(_: str, __: int) -> None:
            raise GiveUp("never")

        await found(kit)
        await publish(kit, {"a": range(30), "b": range(30)})
        async with UnorderedShop(kit, fail).open() as shop:
            await eventually(lambda: has_dead(shop, 60), "all events are dead letters")
        async with shop.app as app:
            assert (await app.dead.replay()).replayed == 60
        done: set[Event] = set()
        for count in (1, 7, 20):
            worker = FailureMember(kit, {"mode": "work", "pause_s": 0.05, "concurrency": 3, **UNORDERED})
            await worker.collect_done(done, len(done) + count)
            worker.kill()
            done |= {(line["key"], line["n"]) for line in worker.rest() if line["report"] == "done"}
            worker.end()
        async with UnorderedShop(kit, fine).open() as last:
            await until(lambda: len(done.union(last.done)) == 60, "all events are handled")
            await eventually(none_left(last), "the records are removed")

    @pytest.mark.slow
    @scenario(crash_limit=2, max_poll_gap_s=3.0)
    async def test_an_event_that_kills_its_process_becomes_a_dead_letter_and_others_do_not(self, kit: Kit) -> None:
        await found(kit)
        await publish(kit, {key: range(5) for key in "abcdef"})
        done: set[Event] = set()
        store = UnorderedShop(kit, fine)
        async with store.app:
            for _ in range(8):
                worker = FailureMember(kit, {"mode": "work", "die": [["c", 2]], "pause_s": 0.01, **UNORDERED})
                await worker.collect_done(done, 29)
                if len(done) == 29 and await is_settled(store, worker):
                    break
                worker.end()
            assert sorted(done) == [each for each in every("abcdef", 5) if each != ("c", 2)]
            (letter,) = await store.records(State.DEAD)
        assert (letter.event.key, letter.event.value) == ("c", b'{"n":2}')
        assert letter.failure is not None
        assert letter.failure.reason == "crashed"


class UnorderedFailureSuite(
    UnorderedEndScenarios, UnorderedStoreScenarios, UnorderedReplayScenarios, UnorderedCrashScenarios
):
    pass
