"""Decisions of the Kafka broker that need no Kafka."""

import asyncio
import subprocess
import sys
from typing import Any, cast

import pytest
from confluent_kafka import Message

from onward import settings
from onward.brokers import Scheme, open_broker
from onward.brokers.base import Progress, Tries
from onward.brokers.core.bell import Bell
from onward.brokers.core.holdings import Holdings
from onward.brokers.core.session_clock import SessionClock
from onward.brokers.kafka import commit_metadata
from onward.brokers.kafka.aside_topics import groups_of, topic_name, topics_of
from onward.brokers.kafka.certainty import Certainty
from onward.brokers.kafka.client import ClientFactory
from onward.brokers.kafka.commit_metadata import Committed, LogBounds, TextLimit, start_point
from onward.brokers.kafka.commits import Commits
from onward.brokers.kafka.message import received
from onward.errors import BadSetting, MissingExtra
from onward.event import Partition

PLACE = Partition("orders", 2)
LOG = LogBounds("log-a", low=0, high=100, start=100)


def text_of(watermark: int, *, fence: int = 7, clean: bool = True, log_id: str = "log-a", count: int = 4) -> str:
    progress = Progress(PLACE, 1, watermark, [(60, 70)], tries={55: Tries(failed=2)})
    suffix = commit_metadata.suffix_of(log_id, count)
    text, _ = commit_metadata.write(progress, fence, clean=clean, owner="", suffix=suffix, limit=TextLimit())
    return text


# Where an owner starts


def test_an_owner_starts_where_the_last_one_ended() -> None:
    found = start_point(PLACE, Committed(50, text_of(50)), LOG, began_with=4)
    assert (found.position, found.fence, found.unclean, found.note) == (50, 8, False, "")
    assert found.stored is not None
    assert list(found.stored.done_above) == [(60, 70)]
    assert dict(found.stored.tries) == {55: Tries(failed=2)}
    assert start_point(PLACE, Committed(50, text_of(50, clean=False)), LOG, began_with=4).unclean


@pytest.mark.parametrize(
    ("committed", "log", "position", "done"),
    [
        (Committed(50, text_of(40)), LOG, 50, []),  # moved by a tool that did not change the text
        (Committed(50, ""), LOG, 50, []),
        (Committed(50, "foreign"), LOG, 50, []),
        (Committed(50, text_of(50, log_id="log-b")), LOG, 0, []),  # of another log
        (Committed(50, text_of(50)), LOG._replace(high=49), 0, []),  # the log was cut
        (Committed(50, text_of(50)), LOG._replace(low=65), 65, [(65, 70)]),  # retention
        (Committed(50, text_of(50)), LOG._replace(low=80), 80, []),
    ],
)
def test_no_event_is_skipped(committed: Committed, log: LogBounds, position: int, done: list[tuple[int, int]]) -> None:
    found = start_point(PLACE, committed, log, began_with=4)
    assert found.position == position
    assert list(found.stored.done_above if found.stored else []) == done


def test_a_fence_grows_after_a_reset_of_the_group() -> None:
    before = start_point(PLACE, Committed(None, ""), LOG, began_with=0).fence
    assert start_point(PLACE, Committed(50, text_of(50, fence=before)), LOG, began_with=4).fence == before + 1
    assert (
        start_point(PLACE, Committed(50, text_of(50, fence=before, log_id="b")), LOG, began_with=4).fence == before + 1
    )
    assert start_point(PLACE, Committed(0, ""), LOG, began_with=4).fence >= before


@pytest.mark.parametrize(("began_with", "position"), [(0, 100), (4, 100), (2, 0)])
def test_a_group_starts_where_it_says_but_an_added_partition_at_its_beginning(began_with: int, position: int) -> None:
    assert start_point(PLACE, Committed(None, ""), LOG, began_with=began_with).position == position


def test_every_commit_contains_the_partition_count_that_the_group_began_with() -> None:
    assert commit_metadata.partitions_at_start({0: Committed(None, ""), 1: Committed(None, "")}, 2) == 0
    assert commit_metadata.partitions_at_start({0: Committed(5, text_of(5, count=4)), 7: Committed(None, "")}, 8) == 4
    assert commit_metadata.partitions_at_start({0: Committed(5, ""), 1: Committed(None, "")}, 8) == 8


def test_refused_metadata_becomes_smaller_and_keeps_the_lowest_positions() -> None:
    progress = Progress(PLACE, 1, 0, [(n, n + 1) for n in range(1, 90_000, 3)])
    limit, suffix = TextLimit(), commit_metadata.suffix_of("log", 1)
    for _ in range(4):
        text, encoded = commit_metadata.write(progress, 3, clean=False, owner="", suffix=suffix, limit=limit)
        assert len(text) <= limit.chars
        found = commit_metadata.read(text, 0).progress
        assert found.fence == 3
        assert found.done_above == [span for span in progress.done_above if span[1] <= encoded.covered_to]
        limit = limit.smaller()


# The topics of asides


def test_the_asides_of_a_group_and_of_a_topic_are_found_by_name() -> None:
    names = ["orders", topic_name("billing", "orders"), "payments", topic_name("mail", "payments")]
    assert topics_of("billing", names) == ["orders"]
    assert groups_of("orders", names) == ["billing"]
    assert len(topic_name("g" * 200, "t" * 200)) <= 249


def test_an_aside_that_may_belong_to_another_topic_is_not_found() -> None:
    """Names may contain two dots: this is the aside of group x and topic y..orders, or of group x..y and orders."""
    both = topic_name("x", "y..orders")
    assert groups_of("orders", ["orders", "y..orders", both]) == []
    assert groups_of("y..orders", ["orders", "y..orders", both]) == ["x"]


# Certainty


class Answers:
    """The coordinator's answers to this member."""

    accepted_at = answered_at = 0.0
    proofs = 0

    def prove(self) -> None:
        self.proofs += 1


def test_a_member_that_is_sure_again_rings_the_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    time = 100.0
    monkeypatch.setattr("onward.clock.now", lambda: time)
    answers, bell = Answers(), Bell()
    session = SessionClock(10.0, time, reports_loss=True)
    certainty = Certainty(session, cast("Commits", answers), Holdings(bell), max_poll_gap_s=60.0)
    for time in (101.0, 110.0, 111.0):  # noqa: B007 - read by the clock
        certainty.look()
    assert answers.proofs == 2
    assert bell.listen() == 0
    answers.accepted_at = 110.5
    certainty.look()
    assert bell.listen() == 1


# Settings


def test_without_the_extra_the_error_names_the_command_that_installs_it() -> None:
    schemes = {"kafka": Scheme("onward.brokers.kafka", "Kafka", needs="no_such_library", extra="kafka")}
    with pytest.raises(MissingExtra, match=r"pip install 'onward\[kafka\]'"):
        asyncio.run(open_broker(settings.load("kafka://localhost"), schemes))


def test_importing_onward_does_not_import_the_client() -> None:
    script = "import onward, sys; sys.exit('confluent_kafka' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_settings_of_the_client_are_passed_by_name_and_never_printed() -> None:
    url = "kafka://ann:pa%40ss@one,two:9093?client.security.protocol=SASL_SSL&partitions=3&client.linger.ms=7"
    loaded = settings.load(url, client={"sasl.password": "secret", "ssl.key.password": "secret"})
    assert loaded.partitions == 3
    assert dict(loaded.client) == {
        "security.protocol": "SASL_SSL",
        "linger.ms": "7",
        "sasl.password": "secret",
        "ssl.key.password": "secret",
    }
    assert "secret" not in repr(loaded)
    client = ClientFactory(loaded.url, loaded)
    assert client.servers == "one:9092,two:9093"
    assert "pa" not in repr(client)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"enable.idempotence": "false"}, "enable.idempotence cannot be set"),
        ({"group.id": "x"}, "group.id cannot be set"),
        ({"no.such.setting": "x"}, "no.such.setting"),
        ({"security.protocol": "carrier-pigeon"}, "security.protocol"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], match: str) -> None:
    loaded = settings.load("kafka://localhost:1", client=given)
    with pytest.raises(BadSetting, match=match):
        ClientFactory(loaded.url, loaded).producer()


@pytest.mark.parametrize(
    ("url", "client"),
    [
        ("kafka://ann:s3cret@localhost:1", {}),
        ("kafka://localhost:1?client.sasl.mechanism=PLAIN", {"sasl.username": "ann", "sasl.password": "s3cret"}),
        ("kafka://localhost:1", {"oauth_cb": print}),
    ],
)
def test_a_login_that_would_not_be_used_is_refused_at_open(url: str, client: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match=r"\?client\.security\.protocol=SASL_SSL") as raised:
        asyncio.run(open_broker(settings.load(url, client=client)))
    assert "s3cret" not in str(raised.value)


def test_a_path_in_the_url_is_refused() -> None:
    loaded = settings.load("kafka://localhost:1/orders")
    with pytest.raises(BadSetting, match=r"a Kafka URL has no path: remove /orders"):
        ClientFactory(loaded.url, loaded)
    ClientFactory("kafka://localhost:1/", loaded)


def test_a_wrong_secret_is_not_in_the_error() -> None:
    loaded = settings.load("kafka://localhost:1", client={"ssl.ca.pem": "-----secret-----", "security.protocol": "ssl"})
    with pytest.raises(BadSetting) as raised:
        ClientFactory(loaded.url, loaded).producer()
    assert "secret" not in str(raised.value)


# Late decoding


@pytest.mark.parametrize(
    ("headers", "own"),
    [
        ([("ce_id", b"7"), ("ce_type", b"Placed"), ("note", None), ("note", b"\xff")], {"note": "\\xff"}),
        ([("ce_id", b"7"), ("ce_type", b"Placed")], {}),
        (None, {}),
    ],
)
def test_headers_are_the_same_before_and_after_the_rest_is_decoded(headers: Any, own: dict[str, str]) -> None:
    message: Any = Message(topic="orders", partition=1, offset=5, value=b"{}", headers=headers, timestamp=(1, 1234))
    event = received(message, "orders")
    assert event.headers == own
    assert event.id == ("7" if headers else "orders/1/5")
    assert event.headers == event.whole().headers == own


def test_an_invalid_setting_of_the_producer_is_refused_before_anything_is_published() -> None:
    with pytest.raises(BadSetting, match="Invalid value"):
        asyncio.run(open_broker(settings.load("kafka://127.0.0.1:9?client.linger.ms=abc")))
