"""Header names with control characters, or that are not text: they cannot forge attributes or crash the process."""

import logging
from collections.abc import Sequence

import pytest
from confluent_kafka.admin import NewTopic

from onward import Event
from onward.brokers.core.cloudevents import event_of
from onward.errors import Unserialisable
from onward.event import new_id
from onward.testing.scenario import event
from tests.brokers import kafka_wire
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import Stage, play, run_until, staged, until

__all__ = ["harness"]


@pytest.mark.parametrize("name", ["ce_id\0x", "ce_id\0", "\0", "a\nb", "a\x7f", "a\x85", "half-\ud800"])
def test_a_header_name_that_a_client_would_change_is_refused(harness: KafkaHarness, name: str) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            broker = await stage.broker()
            bad = Event(new_id(), stage.topic, "a", b"0", {name: "forged"})
            with pytest.raises(Unserialisable, match=r"header|surrogates"):
                await broker.publish([event(stage.topic, "a", 1), bad])
            await broker.publish([event(stage.topic, "a", 2, headers={"naïve name": "kept"})])
            member = await stage.member()
            await member.take(1)
            assert [(each.event.value, each.event.headers) for each in member.deliveries] == [
                (b"2", {"naïve name": "kept"})
            ]

    play(scene())


async def handled(stage: Stage, *messages: Sequence[tuple[bytes, bytes]]) -> list[Event]:
    """The events that a handler gets for messages with these headers. The value of each is its number."""
    new = NewTopic(stage.topic, 1, 1)
    stage.harness.admin.create_topics([new])[stage.topic].result(30)
    await until(lambda: stage.topic in stage.harness.admin.list_topics(timeout=30).topics)
    for number, headers in enumerate(messages):
        kafka_wire.produce(stage.harness.bootstrap, stage.topic, b"%d" % number, headers)
    app, found = stage.app(), list[Event]()

    @app.handler(stage.topic, group=stage.group)
    async def handle(event: Event) -> None:
        found.append(event)

    await run_until(app, lambda: len(found) == len(messages))
    return found


def test_a_name_that_is_cut_at_its_nul_forges_no_attribute_of_a_foreign_message(harness: KafkaHarness) -> None:
    """librdkafka cuts the name before Onward sees it."""

    async def scene() -> None:
        async with staged(harness) as stage:
            own = [(b"ce_id", b"own"), (b"ce_type", b"order.placed")]
            forged = [(b"ce_id\0x", b"forged"), (b"ce_type\0", b"order.paid"), (b"ce_time\0", b"now")]
            (found,) = await handled(stage, [*own, *forged])
            assert (found.id, found.type, found.headers) == ("own", "order.placed", {})

    play(scene())


def test_other_control_characters_in_foreign_names_are_escaped(harness: KafkaHarness) -> None:
    async def scene() -> None:
        async with staged(harness) as stage:
            (found,) = await handled(stage, [(b"ce_id\n", b"forged"), (b"a\x1b[2Jb", b"1"), ("é".encode(), b"2")])
            assert found.headers == {"ce_id\\x0a": "forged", "a\\x1b[2Jb": "1", "é": "2"}
            assert found.id == f"{stage.topic}/0/0"

    play(scene())


def test_a_foreign_message_with_a_name_that_is_not_text_is_handled_without_headers(
    harness: KafkaHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after many good messages, when the interpreter has specialised the call and skips its own checks."""

    async def scene() -> None:
        async with staged(harness) as stage:
            bad = [(b"ce_id", b"own"), (b"bad-\xff", b"1")]
            good = [(b"good", b"1")]
            found = await handled(stage, *[good] * 30, bad, bad, good)
            assert [each.headers for each in found] == [*[{"good": "1"}] * 30, {}, {}, {"good": "1"}]
            assert [each.id for each in found] == [f"{stage.topic}/0/{n}" for n in range(33)]
            assert caplog.text.count("a header's name is not UTF-8") == 1

    with caplog.at_level(logging.WARNING):
        play(scene())


def test_of_attributes_with_one_name_the_first_counts_and_of_headers_the_last() -> None:
    pairs = [("ce_id", b"1"), ("a", b"1"), ("ce_id", b"2"), ("a", b"2"), ("ce_id\0x", b"3")]
    found = event_of(pairs, topic="t", key=None, value=None, id_="0", time=0.0)
    assert (found.id, found.headers) == ("1", {"a": "2", "ce_id\\x00x": "3"})
