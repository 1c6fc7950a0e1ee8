"""What the crew decides from a broker's features and members, and how it names its own member."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from onward import GiveUp, Onward
from onward.brokers.base import GroupInfo, MemberInfo, Ordering
from onward.errors import BadHandler, BadSetting, BrokerError
from onward.inbox import SqlInbox
from tests.test_app import until


@pytest.fixture
def app(tmp_path: Path) -> Onward:
    return Onward(f"sqlite:///{tmp_path}/shop.db", lease_s=1.0, dead_check_s=0.05)


def offer(app: Onward, monkeypatch: pytest.MonkeyPatch, **features: Any) -> None:
    """Replace features of the open broker."""
    monkeypatch.setattr(app.broker, "features", msgspec.structs.replace(app.broker.features, **features))


def test_a_start_that_the_broker_does_not_support_is_refused(app: Onward, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.handler("orders", group="late", start=1.5)
    async def late(order: dict[str, int]) -> None: ...

    async def main() -> None:
        async with app:
            offer(app, monkeypatch, starts=frozenset({"earliest", "latest"}))
            with pytest.raises(BadHandler, match=r"late: start=1\.5; this broker supports 'earliest', 'latest'"):
                await app.run()
            assert not await app.broker.groups("orders"), "it was refused before it joined"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("ordering", "features", "refused"),
    [
        ("key", {}, False),
        ("none", {}, False),
        ("key", {"stable_positions": False}, True),
        ("key", {"fence": False}, True),
        ("key", {"shared": True}, False),
        ("none", {"shared": True}, True),
    ],
)
def test_the_inbox_of_a_batch_handler_needs_stable_positions(
    app: Onward,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ordering: Any,
    features: dict[str, bool],
    refused: bool,
) -> None:
    async def main() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/billing.db")
        inbox = SqlInbox(engine)
        await inbox.create_async()

        @app.handler("orders", group="billing", ordering=ordering, batch_size=10, inbox=inbox)
        async def bill(orders: list[dict[str, int]], connection: AsyncConnection) -> None: ...

        async with app:
            offer(app, monkeypatch, **features)
            running = app.run()
            app.stop()
            try:
                await running
            finally:
                await engine.dispose()

    if refused:
        with pytest.raises(BadSetting, match="stable positions and a fence"):
            asyncio.run(main())
    else:
        asyncio.run(main())


@pytest.mark.parametrize(("others", "counts"), [([], True), (["~"], True), (["!", "~"], False)])
def test_of_the_members_that_share_a_partition_the_first_by_name_counts_dead_letters(
    app: Onward, monkeypatch: pytest.MonkeyPatch, others: list[str], counts: bool
) -> None:
    asked: list[str] = []

    @app.handler("orders", group="billing", ordering="none")
    async def bill(order: dict[str, int]) -> None:
        raise GiveUp("no")

    async def main() -> None:
        async with app:
            offer(app, monkeypatch, shared=True)
            real = app.broker.groups

            async def groups(topic: str) -> Sequence[GroupInfo]:
                asked.append(topic)
                members = [MemberInfo(name) for name in others]
                return [*await real("nothing"), GroupInfo("billing", topic, members, {})]

            monkeypatch.setattr(app.broker, "groups", groups)
            await app.publish("orders", {"n": 1})
            async with app.running():
                await until(lambda: app.readings()[0].dead == 1)
                before = len(asked)
                await until(lambda: len(asked) > before + 2)
                assert (app.readings()[0].dead_letters is not None) == counts

    asyncio.run(main())


@pytest.mark.parametrize("endpoint", [None, "shop-1:9464"])
def test_a_member_carries_the_endpoint_of_its_process(app: Onward, endpoint: str | None) -> None:
    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    async def main() -> None:
        app.endpoint = endpoint
        async with app.running():
            (group,) = await app.broker.groups("orders")
            (member,) = group.members
            assert (member.endpoint, member.ordering) == (endpoint, "key")
            assert str(os.getpid()) in member.name.split("-")

    asyncio.run(main())


def test_a_member_with_another_ordering_is_refused_before_it_joins(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"

    def application(ordering: Ordering) -> Onward:
        app = Onward(url, lease_s=5.0)

        @app.handler("orders", group="billing", ordering=ordering)
        async def bill(order: dict[str, int]) -> None: ...

        return app

    async def main() -> None:
        async with application("key").running() as first:
            others: list[Ordering] = ["none", "partition"]
            for ordering in others:
                with pytest.raises(BadHandler, match=rf"ordering='{ordering}'.*member .*-{os.getpid()}-.*'key'; stop"):
                    await application(ordering).run()
            (group,) = await first.broker.groups("orders")
            assert len(group.members) == 1
            async with application("key").running():
                pass
        async with application("none").running():
            pass

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (BrokerError("not now"), "not now"),
        (BrokerError(), "BrokerError"),
        (TimeoutError(), "the broker did not answer within 2 s"),
    ],
)
def test_handlers_start_when_the_broker_cannot_list_members(
    app: Onward, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, cause: str
) -> None:
    handled: list[int] = []

    @app.handler("orders", group="billing")
    async def bill(order: dict[str, int]) -> None:
        handled.append(order["n"])

    async def owners(topic: str, group: str) -> Sequence[MemberInfo]:
        raise error

    async def main() -> None:
        async with app:
            monkeypatch.setattr(app.broker, "owners", owners)
            async with app.running():
                await app.publish("orders", {"n": 1})
                await until(lambda: handled == [1])

    asyncio.run(main())
    assert f"cannot check whether its group has another ordering: {cause}\n" in caplog.text


@pytest.mark.parametrize("text", ["web-1", "web-1@a:1", "web-1#none", "web-1@a:1#key", "a#b@c#d:1#partition", "a#b"])
def test_the_text_of_a_member_is_parsed_back_to_the_same_member(text: str) -> None:
    info = MemberInfo.parse(text)
    assert str(info) == text
    assert MemberInfo.parse(str(info)) == info
