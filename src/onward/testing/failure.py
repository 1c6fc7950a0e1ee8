"""The failure suite: what happens to events whose handlers fail. It runs whole applications.

It is the same for all brokers. A subclass provides the fixture `harness`, an AsideUnderTest.
"""

import asyncio
import time
from typing import Any

import pytest

from onward import GiveUp, Retry, RetryLater, Skip
from onward.brokers.base import State
from onward.testing.failure_shop import (
    GROUP,
    FailureMember,
    FailureShop,
    eventually,
    fine,
    has_records,
    has_state,
    none_left,
    publish,
    until,
)
from onward.testing.scenario import Kit, scenario

MANY = 20_000


class EndScenarios:
    """How an event ends: attempts used up, success after retries, decided by the handler, undecodable, expired."""

    @scenario()
    async def test_an_event_that_used_up_its_attempts_becomes_a_dead_letter_and_its_key_goes_on(self, kit: Kit) -> None:
        async def handle(key: str, n: int) -> None:
            if (key, n) == ("a", 1):
                raise ValueError(f"no stock for {n}")

        before = time.time()
        await publish(kit, {"a": range(4), "b": range(4)})
        async with FailureShop(kit, handle).open() as shop:
            await until(lambda: len(shop.done) == 7, "all events but one are handled")
            (letter,) = await shop.records()
        assert (shop.of("a"), shop.of("b")) == ([0, 2, 3], [0, 1, 2, 3])
        assert shop.tried.count(("a", 1)) == 3
        assert letter.state is State.DEAD
        assert (letter.event.key, letter.event.value) == ("a", b'{"n":1}')
        failure = letter.failure
        assert failure is not None
        assert (failure.reason, failure.error, failure.message) == ("exhausted", "ValueError", "no stock for 1")
        assert "raise ValueError" in failure.traceback
        assert failure.handler.endswith("bill")
        assert failure.attempts == 3
        assert before <= failure.first <= failure.last - 0.05, "the times of the first and the last failure"

    @scenario()
    async def test_an_event_that_succeeds_after_retries_keeps_its_place_in_the_order(self, kit: Kit) -> None:
        async def handle(key: str, n: int) -> None:
            if n % 3 == 1 and shop.tried.count((key, n)) < 3:
                raise ConnectionError("the bank is closed")

        await publish(kit, {key: range(6) for key in "abcd"})
        async with FailureShop(kit, handle).open() as shop:
            await until(lambda: len(shop.done) == 24, "all events are handled")
            assert not await shop.records()
        assert {key: shop.of(key) for key in "abcd"} == {key: list(range(6)) for key in "abcd"}

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

        await publish(kit, {"a": range(4)})
        async with FailureShop(kit, handle).open() as shop:
            await until(lambda: shop.of("a") == [2, 3], "the other events are handled")
            (letter,) = await shop.records()
        assert shop.tried == [("a", 0), ("a", 1), ("a", 2), ("a", 2), ("a", 3)]
        assert letter.failure is not None
        assert (letter.failure.reason, letter.failure.message) == ("refused", "no such customer")

    @scenario()
    async def test_an_undecodable_event_is_a_dead_letter_at_once_with_its_raw_value(self, kit: Kit) -> None:
        shop = FailureShop(kit, fine)
        async with shop.open():
            await shop.app.publish(kit.topic, b"\xff no json", key="a", headers={"origin": "shell"})
            await shop.app.publish(kit.topic, {"n": 1}, key="a")
            await until(lambda: shop.of("a") == [1], "the key goes on")
            (letter,) = await shop.records()
        assert (letter.event.value, letter.event.headers) == (b"\xff no json", {"origin": "shell"})
        assert letter.failure is not None
        assert (letter.failure.reason, letter.failure.attempts) == ("undecodable", 1)

    @scenario()
    async def test_an_expired_event_becomes_a_dead_letter_when_its_turn_comes(self, kit: Kit) -> None:
        gate = asyncio.Event()

        async def handle(_: str, n: int) -> None:
            if n == 0:
                await gate.wait()

        shop = FailureShop(kit, handle)
        async with shop.open():
            for n, expires_s in enumerate([None, 0.3, 600.0]):
                await shop.app.publish(kit.topic, {"n": n}, key="a", expires_s=expires_s)
            await asyncio.sleep(0.4)  # it expires while it waits for its turn
            gate.set()
            await until(lambda: shop.of("a") == [0, 2], "the key goes on")
            (letter,) = await shop.records()
        assert ("a", 1) not in shop.tried
        assert letter.failure is not None
        assert (letter.failure.reason, letter.failure.attempts) == ("expired", 0)


class ParkingScenarios:
    @scenario(park_after_s=0.05, partitions=1)
    async def test_a_key_with_a_long_retry_is_parked_and_drains_in_order(self, kit: Kit) -> None:
        """Events that arrive while the key drains stay in order too."""
        gate = asyncio.Event()

        async def handle(key: str, n: int) -> None:
            if (key, n) == ("a", 2) and not gate.is_set():
                raise ConnectionError("the bank is closed")

        retry = Retry(attempts=1_000, first_delay_s=0.3, factor=1, jitter=0)
        await publish(kit, {"a": range(20), "b": range(20)})
        async with FailureShop(kit, handle, retry=retry).open() as shop:
            await until(lambda: len(shop.of("b")) == 20, "the other key goes on")
            await eventually(lambda: has_state(shop, State.HELD, 17), "the later events of the key are held")
            assert shop.of("a") == [0, 1]
            for n in range(20, 60):
                await shop.app.publish(kit.topic, {"n": n}, key="a")
                if n == 40:
                    gate.set()
            await until(lambda: len(shop.of("a")) == 60, "the key has drained")
            await eventually(none_left(shop), "its records are removed")
        assert shop.of("a") == list(range(60))

    @scenario(max_in_flight=40, partitions=1)
    async def test_a_key_that_fills_its_partition_is_parked_and_drains_in_order(self, kit: Kit) -> None:
        """Events that arrive while the key drains stay in order too."""
        gate = asyncio.Event()

        async def handle(key: str, _: int) -> None:
            if key == "a":
                await gate.wait()

        await publish(kit, {"a": range(100), "b": range(30)})
        async with FailureShop(kit, handle).open() as shop:
            await until(lambda: len(shop.of("b")) == 30, "the other key goes on")
            assert len(await shop.records(State.HELD)) >= 50
            gate.set()
            for n in range(100, 130):
                await shop.app.publish(kit.topic, {"n": n}, key="a")
            await until(lambda: len(shop.of("a")) == 130, "the key has drained")
            await eventually(none_left(shop), "its records are removed")
        assert shop.of("a") == list(range(130))

    @scenario()
    async def test_without_ordering_a_delayed_retry_is_stored_as_a_waiting_record(self, kit: Kit) -> None:
        gate = asyncio.Event()

        async def handle(_: str, n: int) -> None:
            if n == 0 and not gate.is_set():
                raise RetryLater(1.0)

        if (await kit.broker()).features.shared:
            pytest.skip("the broker stores the retries of a shared partition where it likes")
        await publish(kit, {"a": range(3)})
        async with FailureShop(kit, handle, ordering="none", retry=Retry(attempts=1_000)).open() as shop:
            await until(lambda: sorted(shop.of("a")) == [1, 2], "the other events are handled")
            await eventually(lambda: has_state(shop, State.WAITING), "the retry is stored")
            gate.set()
            await until(lambda: sorted(shop.of("a")) == [0, 1, 2], "the retry is handled")

    @scenario(park_after_s=0.05, partitions=1)
    async def test_a_parked_key_survives_a_crash(self, kit: Kit) -> None:
        await publish(kit, {"a": range(10)})
        task = {"mode": "work", "later": [["a", 3]], "after_s": 5.0}
        worker = FailureMember(kit, task)
        while (await worker.line())["report"] != "later":
            pass
        await publish(kit, {"a": range(10, 15)})
        store = FailureShop(kit, fine)
        async with store.app:
            await eventually(lambda: has_records(store, 12), "the key is parked")
        worker.end()
        async with FailureShop(kit, fine).open() as shop:
            await until(lambda: len(shop.of("a")) == 12, "the next owner drains the key")
        assert shop.of("a") == list(range(3, 15))

    @pytest.mark.slow
    @scenario(park_after_s=0.05, partitions=1)
    async def test_many_events_of_one_key_drain_in_order(self, kit: Kit) -> None:
        gate = asyncio.Event()

        async def handle(_: str, n: int) -> None:
            if n == 0 and not gate.is_set():
                raise RetryLater(1.0)

        await publish(kit, {"a": range(MANY)})
        async with FailureShop(kit, handle, retry=Retry(attempts=1_000)).open() as shop:
            await eventually(lambda: has_state(shop, State.HELD, MANY // 10), "many events are held", within_s=60.0)
            gate.set()
            await until(lambda: len(shop.done) >= MANY, "the key has drained", within_s=90.0)
        assert shop.of("a") == list(range(MANY))


class StoreScenarios:
    @scenario()
    async def test_while_a_record_cannot_be_stored_its_event_stays_open_and_readiness_ends(self, kit: Kit) -> None:
        async def handle(key: str, n: int) -> None:
            if (key, n) == ("a", 0):
                raise GiveUp("never")

        harness: Any = kit.harness
        shop = FailureShop(kit, handle)
        assert not shop.app.health().ready
        async with shop.open():
            await shop.app.publish(kit.topic, {"n": 99}, key="z")
            await until(lambda: shop.of("z") == [99], "the handler runs")
            await until(lambda: shop.app.health().ready, "the application is ready")
            with harness.refuse_aside():
                await publish(kit, {"a": range(3), "b": range(3)})
                await until(lambda: shop.of("b") == [0, 1, 2], "other keys go on")
                await until(lambda: not shop.app.health().ready, "readiness ends")
                await until(lambda: "set aside" in " ".join(shop.app.health().troubles), "the reason is named")
                assert shop.of("a") == []
            await until(lambda: shop.of("a") == [1, 2], "the key goes on once the dead letter is stored")
            assert len(await shop.records(State.DEAD)) == 1
            await until(lambda: shop.app.health().ready, "readiness recovers")

    @scenario()
    async def test_with_on_dead_hold_a_key_waits_until_its_dead_letter_is_replayed_or_dropped(self, kit: Kit) -> None:
        cured = False

        async def handle(key: str, n: int) -> None:
            if n == 1 and not cured:
                raise GiveUp("never")

        await publish(kit, {"a": range(4), "b": range(4), "c": range(1)})
        shop = FailureShop(kit, handle, on_dead="hold")
        async with shop.open():
            await eventually(lambda: has_records(shop, 6), "two keys are held")
            await until(lambda: shop.of("c") == [0], "the other key is handled")
            assert (shop.of("a"), shop.of("b")) == ([0], [0])
            cured = True
            assert (await shop.app.dead.replay(key="a")).replayed == 1
            await until(lambda: shop.of("a") == [0, 1, 2, 3], "the replayed event and the held ones are handled")
            assert (await shop.app.dead.drop(key="b")).dropped == 1
            await until(lambda: shop.of("b") == [0, 2, 3], "the events held behind the dropped one are handled")


class ReplayScenarios:
    @scenario()
    async def test_another_application_can_replay_while_the_group_runs_and_while_it_does_not(self, kit: Kit) -> None:
        cured = False

        async def handle(_: str, n: int) -> None:
            if n < 3 and not cured:
                raise ValueError("not yet")

        await publish(kit, {"a": range(5), "b": range(5)})
        async with FailureShop(kit, handle).open() as shop:
            await until(lambda: len(shop.done) == 4, "the other events are handled")
            await eventually(lambda: has_records(shop, 6), "six events are dead letters")
        other = FailureShop(kit, handle)
        async with other.app as app:
            assert (await app.dead.replay(key="a", dry_run=True)).replayed == 3
            answer = await app.dead.replay(key="a")
        assert (answer.replayed, answer.failed, answer.left) == (3, 0, 0)
        cured = True
        second = FailureShop(kit, handle)
        async with second.open():
            await until(
                lambda: second.of("a") == [0, 1, 2],
                "the replayed events are handled in order when the group runs again",
            )
            async with other.app as app:
                answer = await app.dead.replay(topic=kit.topic)
            assert (answer.replayed, answer.failed, answer.left) == (3, 0, 0)
            await until(
                lambda: second.of("b") == [0, 1, 2], "the replayed events are handled in order while the group runs"
            )
            await eventually(none_left(second), "the records are removed after success")
        assert len(second.done) == 6, "an event ran twice, or one ran that was not replayed"

    @scenario()
    async def test_concurrent_replays_run_no_event_twice(self, kit: Kit) -> None:
        cured = False

        async def handle(_: str, n: int) -> None:
            if not cured:
                raise GiveUp("never")

        await publish(kit, {f"k{k}": range(20) for k in range(10)})
        shop = FailureShop(kit, handle)
        async with shop.open():
            await eventually(lambda: has_records(shop, 200), "all events are dead letters")
            cured = True
            others = [FailureShop(kit, handle).app for _ in range(2)]
            async with others[0] as one, others[1] as two:
                answers = await asyncio.gather(*(app.dead.replay(group=GROUP) for app in (one, two, shop.app)))
            assert sum(answer.replayed for answer in answers) == 200
            await until(lambda: len(shop.done) >= 200, "all events are handled")
            await eventually(none_left(shop), "the records are removed")
        assert len(shop.done) == 200
        assert all(shop.of(f"k{k}") == list(range(20)) for k in range(10))

    @scenario()
    async def test_a_replay_keeps_to_its_rate_and_can_be_stopped(self, kit: Kit) -> None:
        async def handle(_: str, __: int) -> None:
            raise GiveUp("never")

        await publish(kit, {"a": range(40)})
        shop = FailureShop(kit, handle)
        async with shop.open():
            await eventually(lambda: has_records(shop, 40), "all events are dead letters")
        async with shop.app as app:
            started = time.monotonic()
            assert (await app.dead.replay(rate=20, limit=10)).left == 30
            assert time.monotonic() - started >= 0.4
            replay = app.dead.replaying(rate=5)
            running = asyncio.create_task(replay.run())
            await until(lambda: replay.replayed >= 2, "the replay has started")
            replay.stop()
            answer = await running
        assert replay.total == 30
        assert 2 <= answer.replayed < 30
        assert answer.replayed + answer.left == 30

    @pytest.mark.slow
    @scenario()
    async def test_a_replay_killed_at_any_step_loses_and_repeats_no_event(self, kit: Kit) -> None:
        async def fail(_: str, __: int) -> None:
            raise GiveUp("never")

        await publish(kit, {"a": range(30), "b": range(30)})
        async with FailureShop(kit, fail).open() as shop:
            await eventually(lambda: has_records(shop, 60), "all events are dead letters")
        cured = FailureShop(kit, fine)
        async with cured.open():
            for moved in (0, 1, 5, 9):
                for delay_s in (0.0, 0.004):
                    replaying = FailureMember(kit, {"mode": "replay", "rate": 100})
                    while (await replaying.line()).get("replayed", -1) < moved:
                        pass
                    await asyncio.sleep(delay_s)
                    replaying.end()
            await cured.app.dead.replay()
            await until(lambda: len(cured.done) >= 60, "all events are handled")
            await eventually(none_left(cured), "the records are removed")
        assert (cured.of("a"), cured.of("b")) == (list(range(30)), list(range(30)))

    @pytest.mark.slow
    @scenario()
    async def test_a_worker_killed_during_a_replay_loses_no_event_and_keeps_key_order(self, kit: Kit) -> None:
        async def fail(_: str, __: int) -> None:
            raise GiveUp("never")

        await publish(kit, {"a": range(30), "b": range(30)})
        async with FailureShop(kit, fail).open() as shop:
            await eventually(lambda: has_records(shop, 60), "all events are dead letters")
        async with shop.app as app:
            assert (await app.dead.replay()).replayed == 60
        first: list[tuple[str, int]] = []
        for done in (1, 7, 20):
            worker = FailureMember(kit, {"mode": "work", "pause_s": 0.01})
            reported: list[tuple[str, int]] = []
            while len(reported) < done:
                line = await worker.line()
                reported += [(line["key"], line["n"])] if line["report"] == "done" else []
            worker.kill()
            reported += [(line["key"], line["n"]) for line in worker.rest() if line["report"] == "done"]
            worker.end()
            first += [each for each in reported if each not in first]
        async with FailureShop(kit, fine).open() as last:
            await until(lambda: len({*first, *last.done}) == 60, "all events are handled")
            await eventually(none_left(last), "the records are removed")
        first += [each for each in last.done if each not in first]
        assert [n for key, n in first if key == "a"] == list(range(30))
        assert [n for key, n in first if key == "b"] == list(range(30))


class CrashScenarios:
    @pytest.mark.slow
    @scenario(crash_limit=2)
    async def test_an_event_that_kills_its_process_becomes_a_dead_letter_and_others_do_not(self, kit: Kit) -> None:
        await publish(kit, {key: range(5) for key in "abcdef"})
        done: set[tuple[str, int]] = set()
        store = FailureShop(kit, fine)
        for _ in range(8):
            worker = FailureMember(kit, {"mode": "work", "die": [["c", 2]], "pause_s": 0.01})
            await worker.collect_done(done, 29)
            worker.end()
            if len(done) >= 29:
                break
        assert done == {(key, n) for key in "abcdef" for n in range(5)} - {("c", 2)}
        async with store.app:
            await eventually(lambda: has_records(store, 1), "there is one dead letter")
            (letter,) = await store.records()
        assert (letter.event.key, letter.event.value) == ("c", b'{"n":2}')
        assert letter.failure is not None
        assert letter.failure.reason == "crashed"


class FailureSuite(EndScenarios, ParkingScenarios, StoreScenarios, ReplayScenarios, CrashScenarios):
    """Every promise about events whose handlers fail: how they end, parking, replay and crashes."""
