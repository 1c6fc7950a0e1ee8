"""Ordered publishing in windows: a failed event stops the later events of its key, and no others."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from onward import clock
from onward.brokers.core import publishing
from onward.brokers.core.publishing import Outgoing, Publisher, Refusal, Window, check_relay
from onward.errors import Backlogged, BadSetting, Closed, PublishError
from onward.event import Event, new_id

Done = Callable[[Window[None]], object]


class ByHand:
    """A courier whose answers the test gives."""

    def __init__(self) -> None:
        self.windows: list[tuple[Window[None], Done]] = []

    def take(self, window: Window[None], done: Done) -> None:
        self.windows.append((window, done))

    async def answer(self, refused: dict[str, Refusal] | None = None) -> None:
        """Answer the first window. Events with these values are refused."""
        window, done = self.windows.pop(0)
        for at, item in enumerate(window.items):
            window.answers[at] = (refused or {}).get((item.event.value or b"").decode())
        done(window)
        await asyncio.sleep(0)  # let the publisher continue


def outgoing(key: str | None, value: str, size: int = 1) -> Outgoing[None]:
    return Outgoing(Event(new_id(), "orders", key, value.encode()), 0, size, None)


def publisher(courier: ByHand, max_outgoing_bytes: int = 1 << 20) -> Publisher[None]:
    return Publisher(courier, label="Test", timeout_s=30.0, max_outgoing_bytes=max_outgoing_bytes)


def values(events: tuple[Event, ...]) -> list[bytes | None]:
    return [event.value for event in events]


def test_calls_are_sent_in_their_order_one_window_at_a_time() -> None:
    async def scenario() -> None:
        courier = ByHand()
        publish = publisher(courier)
        calls = [publish.enter([outgoing("a", str(n))]) for n in range(4)]
        assert len(courier.windows) == 1
        await courier.answer()
        await calls[0]
        assert [(item.event.value or b"") for item in courier.windows[0][0].items] == [b"1", b"2", b"3"]
        await courier.answer()
        await asyncio.gather(*calls)

    asyncio.run(scenario())


def test_a_refused_event_stops_its_key_in_queued_calls_and_no_other_key() -> None:
    async def scenario() -> None:
        courier = ByHand()
        publish = publisher(courier)
        first = publish.enter([outgoing("a", "a1")])
        behind = publish.enter([outgoing("a", "a2"), outgoing("b", "b1")])
        keyless = publish.enter([outgoing(None, "n1")])
        await courier.answer({"a1": Refusal("too large")})
        with pytest.raises(PublishError, match="too large") as raised:
            await first
        assert values(raised.value.refused) == [b"a1"]
        await courier.answer()
        with pytest.raises(PublishError, match="earlier event of the same key") as raised:
            await behind
        assert values(raised.value.refused) == [b"a2"], "b1 was accepted"
        await keyless
        again = publish.enter([outgoing("a", "a1")])
        await courier.answer()
        await again

    asyncio.run(scenario())


def test_an_event_with_an_unknown_outcome_is_reported_as_unknown_and_stops_its_key() -> None:
    async def scenario() -> None:
        courier = ByHand()
        publish = publisher(courier)
        call = publish.enter([outgoing("a", "a1")])
        behind = publish.enter([outgoing("a", "a2")])
        await courier.answer({"a1": Refusal("no answer", unknown=True)})
        with pytest.raises(PublishError) as raised:
            await call
        assert (values(raised.value.refused), values(raised.value.unknown)) == ([], [b"a1"])
        with pytest.raises(PublishError) as raised:
            await behind
        assert values(raised.value.refused) == [b"a2"]

    asyncio.run(scenario())


def test_an_event_without_an_answer_is_reported_as_unknown() -> None:
    async def scenario() -> None:
        courier = ByHand()
        call = publisher(courier).enter([outgoing("a", "a1")])
        window, done = courier.windows.pop()
        done(window)
        with pytest.raises(PublishError) as raised:
            await call
        assert values(raised.value.unknown) == [b"a1"]

    asyncio.run(scenario())


def test_waiting_bytes_are_bounded_but_one_call_always_fits() -> None:
    async def scenario() -> None:
        courier = ByHand()
        publish = publisher(courier, max_outgoing_bytes=100)
        large = publish.enter([outgoing("a", "1", size=500)])
        waiting = publish.enter([outgoing("a", "2", size=90)])
        with pytest.raises(Backlogged, match="max_outgoing_bytes=100") as raised:
            await publish.enter([outgoing("b", "3", size=20)])
        assert values(raised.value.refused) == [b"3"]
        await courier.answer()
        await courier.answer()
        await asyncio.gather(large, waiting)

    asyncio.run(scenario())


def test_a_long_call_is_sent_in_several_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(publishing, "WINDOW_EVENTS", 3)
        courier = ByHand()
        call = publisher(courier).enter([outgoing("a", str(n)) for n in range(5)] + [outgoing("b", "b")])
        await courier.answer({"2": Refusal("no")})
        await courier.answer()
        with pytest.raises(PublishError) as raised:
            await call
        assert values(raised.value.refused) == [b"2", b"3", b"4"]

    asyncio.run(scenario())


def test_events_of_a_cancelled_caller_are_still_sent() -> None:
    async def scenario() -> None:
        courier = ByHand()
        publish = publisher(courier)
        call = asyncio.ensure_future(publish.enter([outgoing("a", "1")]))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        after = publish.enter([outgoing("a", "2")])
        await courier.answer({"1": Refusal("no")})
        with pytest.raises(PublishError):
            await after

    asyncio.run(scenario())


def test_close_finishes_queued_calls_and_refuses_new_ones() -> None:
    async def scenario() -> None:
        courier = ByHand()
        publish = publisher(courier)
        calls = [publish.enter([outgoing("a", str(n))]) for n in range(2)]
        closing = asyncio.ensure_future(publish.close())
        await asyncio.sleep(0)
        with pytest.raises(Closed):
            publish.enter([outgoing("a", "late")])
        await courier.answer()
        await calls[0]
        assert not closing.done()
        await courier.answer()
        await asyncio.gather(closing, *calls)

    asyncio.run(scenario())


def test_a_window_has_the_deadline_of_its_first_call() -> None:
    async def scenario() -> None:
        courier = ByHand()
        call = publisher(courier).enter([outgoing("a", "1")])
        assert 29.0 < courier.windows[0][0].deadline - clock.now() <= 30.0
        await courier.answer()
        await call

    asyncio.run(scenario())


def test_close_can_be_called_again_and_cancelled_while_a_window_is_being_sent() -> None:
    async def scenario() -> None:
        courier = ByHand()
        publish = publisher(courier)
        call = publish.enter([outgoing("a", "1")])
        closings = [asyncio.ensure_future(publish.close()) for _ in range(3)]
        await asyncio.sleep(0)
        closings[0].cancel()
        await asyncio.wait([closings[0]])
        await courier.answer()
        async with asyncio.timeout(10):
            await asyncio.gather(call, *closings[1:])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "relay", [("s", "1"), ("s", None), ("s", 1.5), ("s", True), ("s", -1), ("", 1), ("s", 1 << 63), "ab"]
)
def test_a_relay_that_is_not_a_shard_and_a_fence_is_refused(relay: Any) -> None:
    with pytest.raises(BadSetting, match="relay="):
        check_relay(relay)


@pytest.mark.parametrize(
    ("refusals", "text"),
    [
        ([Refusal("full")], "Test: 1 event was not accepted: full"),
        ([Refusal("full"), Refusal("full")], "Test: 2 events were not accepted: full"),
        ([Refusal("cut", unknown=True)], "Test: it is unknown whether 1 event was accepted: cut"),
        (
            [Refusal("full"), Refusal("cut", unknown=True), Refusal("cut", unknown=True)],
            "Test: 1 event was not accepted, and it is unknown whether 2 events were accepted: full, cut",
        ),
    ],
)
def test_the_error_says_which_events_may_be_stored(refusals: list[Refusal], text: str) -> None:
    """If an unknown event is published again, it may be there twice."""
    failed = [(Event(new_id(), "orders", None, b""), refusal) for refusal in refusals]
    assert str(publishing.combined("Test", failed)) == text
