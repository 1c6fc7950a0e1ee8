"""`app.dead`, over several groups and topics."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from onward import Event, GiveUp, Onward
from onward.errors import BadSetting, BrokerError, ConfigError, NoSuchLetter
from onward.failure.dead import DeadLetters, LetterScan
from onward.testing.failure_shop import eventually


@asynccontextmanager
async def cemetery(folder: Path, *, orders: int = 5) -> AsyncIterator[tuple[Onward, list[Event]]]:
    """Dead letters: every order in two groups, and one payment in its group."""
    app = Onward(f"sqlite:///{folder}/shop.db", partitions=2, lease_s=1.0)
    for topic, group in (("orders", "billing"), ("orders", "mailing"), ("payments", "billing")):

        @app.handler(topic, group=group)
        async def give_up(event: Event) -> None:
            raise GiveUp(f"no {event.key}")

    async with app:
        events = await app.publish_many("orders", [(f"c-{n % 2}", {"n": n}) for n in range(orders)])
        await app.publish("payments", {"n": 0}, key="c-0")
        running = asyncio.create_task(app.run())

        async def all_dead() -> bool:
            return await app.dead.count() == 2 * orders + 1

        await eventually(all_dead, "all are dead")
        app.stop()
        await running
        yield app, events


def run(scenario: Callable[[Onward, list[Event]], Awaitable[None]], folder: Path) -> None:
    async def main() -> None:
        async with cemetery(folder) as (app, events):
            await scenario(app, events)

    asyncio.run(main())


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 10, 11, 50])
def test_pages_list_the_letters_of_all_groups_exactly_once(tmp_path: Path, limit: int) -> None:
    async def scenario(app: Onward, _: list[Event]) -> None:
        found: list[str] = []
        page = LetterScan((), None)
        while not found or page.after is not None:
            page = await app.dead.list(limit=limit, after=page.after)
            assert len(page.letters) <= limit
            assert page.letters, "an empty page"
            found += [letter.id for letter in page.letters]
        assert len(found) == len(set(found)) == 11

    run(scenario, tmp_path)


def test_letters_are_selected_by_each_option(tmp_path: Path) -> None:
    async def scenario(app: Onward, events: list[Event]) -> None:
        count = app.dead.count
        assert await count(group="billing") == 6
        assert await count(topic="orders") == 10
        assert await count(topic="payments", group="mailing") == 0
        assert await count(topic="orders", key="c-1") == 4
        assert await count(text="no c-1") == 4
        assert await count(error="GiveUp", since=0) == 11
        assert await count(until=1.0) == 0
        assert await count(ids=[events[0].id, "missing"]) == 2
        stranger = DeadLetters(app.broker, ())
        assert await stranger.count(topic="orders") == 10
        assert await stranger.count() == 11
        assert await stranger.count(text="no c-1") == 4
        assert len((await stranger.list()).letters) == 11
        assert (await stranger.show(events[1].id, topic="orders", group="billing")).event == events[1]
        for change in (stranger.replay(), stranger.drop(), stranger.drop(dry_run=True), stranger.send("copies")):
            with pytest.raises(ConfigError, match="give a topic, a group"):
                await change
        assert (await stranger.drop(ids=[events[1].id])).dropped == 2
        with pytest.raises(BrokerError, match="cursor"):
            await app.dead.list(after="billing:nonsense")
        with pytest.raises(BadSetting, match="not the cursor"):
            await app.dead.list(after="nonsense")
        with pytest.raises(BadSetting, match="ids="):
            await app.dead.list(ids=[])
        with pytest.raises(BadSetting, match="rate=0"):
            await app.dead.replay(rate=0)

    run(scenario, tmp_path)


def test_show_finds_a_letter_by_its_id_or_the_id_of_its_event(tmp_path: Path) -> None:
    async def scenario(app: Onward, events: list[Event]) -> None:
        with pytest.raises(NoSuchLetter, match="groups billing, mailing"):
            await app.dead.show(events[0].id)
        letter = await app.dead.show(events[0].id, group="mailing")
        assert letter.event == events[0]
        assert await app.dead.show(letter.id) == letter
        with pytest.raises(NoSuchLetter, match="replayed or dropped"):
            await app.dead.show("missing")

    run(scenario, tmp_path)


def test_drop_deletes_the_letter_of_that_group_only(tmp_path: Path) -> None:
    async def scenario(app: Onward, events: list[Event]) -> None:
        planned = await app.dead.drop(group="mailing", limit=2, dry_run=True)
        assert (planned.dropped, planned.left) == (2, 3)
        assert await app.dead.count() == 11
        done = await app.dead.drop(group="mailing", limit=2)
        assert (done.dropped, done.failed, done.left) == (2, 0, 3)
        assert await app.dead.count(group="billing") == 6
        assert (await app.dead.drop(ids=events[0].id)).left == 0

    run(scenario, tmp_path)


def test_letters_of_topics_of_other_applications_do_not_change(tmp_path: Path) -> None:
    """Another application may have a group of the same name."""

    async def scenario(app: Onward, _: list[Event]) -> None:
        other = DeadLetters(app.broker, [("payments", "billing")])
        assert [letter.partition.topic for letter in (await other.list()).letters] == ["payments"]
        assert (await other.drop()).dropped == 1
        assert await app.dead.count() == 10
        assert await other.count(group="billing") == 5, "a choice with a group means all its topics"

    run(scenario, tmp_path)


def test_a_limit_counts_over_all_groups_of_a_replay(tmp_path: Path) -> None:
    async def scenario(app: Onward, _: list[Event]) -> None:
        rehearsed = await app.dead.replay(limit=8, dry_run=True)
        assert (rehearsed.replayed, rehearsed.left) == (8, 3)
        seen: list[int] = []
        answer = await app.dead.replaying(limit=8).run(lambda replay: seen.append(replay.replayed))
        assert (answer.replayed, answer.failed, answer.left) == (8, 0, 3)
        assert seen[0] == 0
        assert seen[-1] == 8
        assert (await app.dead.replay(limit=0)).replayed == 0

    run(scenario, tmp_path)


def test_export_and_send_leave_the_letters_where_they_are(tmp_path: Path) -> None:
    async def scenario(app: Onward, events: list[Event]) -> None:
        lines = [json.loads(line) async for line in app.dead.export(group="mailing")]
        assert {line["event"]["id"] for line in lines} == {event.id for event in events}
        sent = await app.dead.send("sick", group="mailing", limit=3)
        assert sent == 3
        assert await app.dead.count() == 11
        got: list[Event] = []
        reader = Onward(app.settings.url, partitions=2)

        @reader.handler("sick")
        async def read(event: Event) -> None:
            got.append(event)

        running = asyncio.create_task(reader.run())

        async def all_read() -> bool:
            return len(got) == 3

        await eventually(all_read, "the copies are there")
        reader.stop()
        await running
        origin = {event.id: event for event in events}
        for event in got:
            first = origin[event.headers["onward-origin-id"]]
            assert event.id != first.id
            assert (event.key, event.value, event.time) == (first.key, first.value, first.time)
            assert event.headers["onward-origin-group"] == "mailing"
            assert event.headers["onward-dead-reason"] == "refused"

    run(scenario, tmp_path)
