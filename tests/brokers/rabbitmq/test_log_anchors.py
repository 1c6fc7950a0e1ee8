"""Anchors: proofs that a log is still the same."""

import random
from zlib import crc32

import pytest

from onward.brokers.rabbitmq.amqp import Properties, encoded_properties
from onward.brokers.rabbitmq.ordered.log_anchors import AnchorTrail, LogVerdict, judged, mark_of
from onward.brokers.rabbitmq.ordered.token import Anchor

ANCHOR = Anchor(100, 7)


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        (Anchor(100, 7), LogVerdict.SAME),
        (Anchor(100, 8), LogVerdict.CUT),  # another event has its offset
        (Anchor(99, 0), LogVerdict.CUT),  # the log ends before it
        (Anchor(101, 3), LogVerdict.SAME),  # retention has removed only events that are done
        (Anchor(105, 3), LogVerdict.SAME),
        (Anchor(106, 3), LogVerdict.TRIMMED),
    ],
)
def test_the_first_message_from_the_anchor_on_tells_whether_the_log_is_the_same(
    first: Anchor, verdict: LogVerdict
) -> None:
    assert judged(ANCHOR, 105, first) is verdict


@pytest.mark.parametrize(
    "given",
    [
        Properties(message_id="id-1"),
        Properties(message_id="id-1", delivery_mode=2, timestamp=5, type="a.b"),
        Properties("text/plain", "gzip", {"a": "b", "n": 5}, 2, 7, "c", "r", "60", "id-1", 5, "t", "u", "app"),
        Properties(headers={"onward-key": "k" * 500}, message_id="id-1"),
        Properties(reply_to="r", message_id="id-1"),
    ],
)
def test_a_mark_depends_only_on_the_id(given: Properties) -> None:
    assert mark_of(encoded_properties(given), b"body") == crc32(b"id-1")


def test_a_message_without_an_id_is_marked_by_its_body() -> None:
    assert mark_of(encoded_properties(Properties(type="x")), b"body") == crc32(b"body")
    assert mark_of(encoded_properties(Properties()), b"body") == crc32(b"body")


def test_the_anchor_of_a_token_is_the_last_event_below_its_watermark() -> None:
    trail = AnchorTrail(())
    assert trail.below(5) == ()
    for offset in (1, 2, 4, 5, 9):
        trail.add(offset, 10 * offset)
    assert trail.below(1) == ()
    assert trail.below(4)[0] == Anchor(2, 20)
    assert trail.below(5)[0] == Anchor(4, 40)
    assert trail.below(9)[0] == Anchor(5, 50)
    assert trail.below(1_000)[0] == Anchor(9, 90)
    assert trail.last == Anchor(9, 90)


def test_a_trail_begins_with_the_anchors_of_the_token() -> None:
    trail = AnchorTrail((Anchor(40, 1), Anchor(20, 2)))
    assert trail.last == Anchor(40, 1)
    assert trail.below(50) == (Anchor(40, 1), Anchor(20, 2))
    trail.add(60, 3)
    assert trail.below(50)[0] == Anchor(40, 1)
    assert trail.below(61) == (Anchor(60, 3), Anchor(20, 2)) or trail.below(61)[0] == Anchor(60, 3)


def test_a_long_trail_forgets_what_is_done() -> None:
    trail, seen = AnchorTrail(()), random.Random(5)
    watermark = 0
    for offset in range(100_000):
        trail.add(offset, offset % 1_000)
        if seen.random() < 0.01:
            watermark = max(watermark, offset - seen.randrange(5_000))
            if watermark:
                assert trail.below(watermark)[0] == Anchor(watermark - 1, (watermark - 1) % 1_000)
    assert len(trail._offsets) < 30_000
