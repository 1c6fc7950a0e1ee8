"""What the log says of an outage: each cause once, and its end."""

from onward.observe.readiness_news import ReadinessNews

AWAY = "Redis does not answer: refused"


def test_each_cause_is_reported_once_in_an_outage() -> None:
    news = ReadinessNews()
    assert news.of([f"uncertain for 4 s: {AWAY}"]) == [f"uncertain for 4 s: {AWAY}"]
    assert news.of([f"uncertain for 5 s: {AWAY}"]) == []
    assert news.of(["another"]) == ["another"]
    assert news.of([f"uncertain for 9 s: {AWAY}"]) == [], "it comes back in the same outage"


def test_a_cause_that_is_a_part_of_another_is_not_reported() -> None:
    assert ReadinessNews().of([AWAY, f"leases cannot be renewed: {AWAY}"]) == [f"leases cannot be renewed: {AWAY}"]


def test_a_partition_that_stays_stuck_is_reported_once() -> None:
    news = ReadinessNews()
    assert len(news.of(["orders/1 is stuck at position 7: running for 40 s"])) == 1
    assert news.of(["orders/1 is stuck at position 9: waiting"]) == []
    assert len(news.of(["orders/2 is stuck at position 9: waiting"])) == 1


def test_an_outage_ends_when_there_was_no_trouble_for_a_while() -> None:
    news = ReadinessNews()
    ended = []
    for troubles in ([], [], [], [], [AWAY], [], [AWAY], [], [], [], [], []):
        news.of(troubles)
        ended.append(news.is_over())
    assert ended == [False] * 9 + [True, False, False]
    assert news.of([AWAY]) == [AWAY], "another outage"
