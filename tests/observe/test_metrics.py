"""Families of metrics and their text, checked with the parser of Prometheus."""

import re
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from onward.observe.figures import figures
from onward.observe.metrics import Family, Registry, Sample, exposition, folded
from tests.observe.readings import partition, reading


def parsed(text: str) -> dict[str, float]:
    """Each sample by its name and labels, as the parser of Prometheus reads them."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Text(str):
    """A subclass of str, as some enums have."""

    __slots__ = ()


def names(text: str) -> dict[str, str]:
    return {family.name: family.type for family in text_string_to_metric_families(text)}


class TestRegistry:
    def test_a_counter_a_gauge_and_a_histogram(self) -> None:
        registry = Registry()
        registry.counter("relay_published", "Published.", ["topic"]).add(("orders",), 2)
        registry.counter("relay_published", "Published.", ["topic"]).add(("orders",))
        registry.gauge("relay_behind", "Rows.").set((), 7)
        took = registry.histogram("relay_seconds", "Time.", ["topic"], bounds=[0.1, 1.0])
        took.observe(("orders",), [0.05, 0.1])
        took.observe(("orders",), [0.5, 3.0, 0.01])
        took.observe(("orders",), [])
        text = exposition(registry.families())
        assert names(text) == {
            "onward_relay_published": "counter",
            "onward_relay_behind": "gauge",
            "onward_relay_seconds": "histogram",
        }
        assert parsed(text) == {
            "onward_relay_published_total[('topic', 'orders')]": 3,
            "onward_relay_behind[]": 7,
            "onward_relay_seconds_bucket[('le', '0.1'), ('topic', 'orders')]": 3,
            "onward_relay_seconds_bucket[('le', '1.0'), ('topic', 'orders')]": 4,
            "onward_relay_seconds_bucket[('le', '+Inf'), ('topic', 'orders')]": 5,
            "onward_relay_seconds_sum[('topic', 'orders')]": pytest.approx(3.66),
            "onward_relay_seconds_count[('topic', 'orders')]": 5,
        }

    def test_a_collector_is_called_at_every_scrape(self) -> None:
        registry, asked = Registry(), [0]

        def collect() -> list[Family]:
            asked[0] += 1
            return [Family("feeds", "gauge", "Feeds.", (), (Sample((), asked[0]),))]

        registry.collect_from(collect)
        assert [parsed(exposition(registry.families())) for _ in range(2)] == [
            {"onward_feeds[]": 1},
            {"onward_feeds[]": 2},
        ]

    def test_a_collector_that_raises_is_left_out_and_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        registry, scrapes = Registry(), [0]

        def collect() -> Iterator[Family]:
            yield Family("feeds", "gauge", "Feeds.", (), (Sample((), 1),))
            scrapes[0] += 1
            if scrapes[0] < 4:
                raise OSError(f"hiccup {scrapes[0]}")
            if scrapes[0] < 5:
                raise KeyError("feed")

        registry.collect_from(collect)
        registry.counter("published", "Published.").add(())
        for _ in range(4):
            assert parsed(exposition(registry.families())) == {"onward_published_total[]": 1}
        assert parsed(exposition(registry.families())) == {"onward_published_total[]": 1, "onward_feeds[]": 1}
        assert len(re.findall(r"ERROR .* collector \S+\.collect raised", caplog.text)) == 2
        assert "hiccup 1" in caplog.text
        assert "KeyError: 'feed'" in caplog.text

    @pytest.mark.parametrize(
        ("labels", "value"), [(("a", "b"), 1.0), ((), 1.0), ((7,), 1.0), (("a",), None), (("a",), "many")]
    )
    def test_a_metric_with_wrong_labels_or_no_number_is_left_out_and_logged_once(
        self, labels: Any, value: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        registry = Registry()
        registry.counter("published", "Published.").add(())
        registry.gauge("behind", "Rows.", ["topic"]).set(labels, value)
        for _ in range(2):
            assert parsed(exposition(registry.families())) == {"onward_published_total[]": 1}
        assert caplog.text.count("metric behind raised") == 1

    def test_numbers_and_texts_of_other_types_can_be_sent(self) -> None:
        registry = Registry()
        gauge = registry.gauge("behind", "Rows.", ["topic"])
        values = {"a": Decimal("1.5"), "b": Fraction(1, 4), "c": True, "d": 2**70}
        for topic, value in values.items():
            gauge.set((Text(topic),), value)  # type: ignore[arg-type]
        (family,) = registry.families()
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(family), type=Family)
        assert {sample.labels[0]: sample.value for sample in read.samples} == values

    def test_unknown_labels_bad_names_and_conflicting_declarations_are_refused(self) -> None:
        registry = Registry()
        registry.counter("published", "Published.")
        with pytest.raises(ValueError, match="already declared differently"):
            registry.gauge("published", "Published.")
        for label in ("key", "id", "job"):
            with pytest.raises(ValueError, match=f"labels \\['{label}'\\]"):
                registry.counter("by_key", "Published.", [label])
        with pytest.raises(ValueError, match="lower case"):
            registry.counter("by-key", "Published.")
        with pytest.raises(ValueError, match="ascend"):
            registry.histogram("took", "Time.", bounds=[1.0, 0.5])

    def test_special_characters_in_texts_are_preserved(self) -> None:
        odd = 'a "quoted"\nline with \\n'
        family = Family("feeds", "gauge", f"Help: {odd}", ("topic",), (Sample((odd,), float("inf")),))
        (read,) = text_string_to_metric_families(exposition([family]))
        assert read.documentation == f"Help: {odd}"
        assert read.samples[0].labels == {"topic": odd}
        assert read.samples[0].value == float("inf")


@pytest.mark.parametrize("buckets", [(), (1,), (1, 2, 3)])
def test_a_histogram_without_its_buckets_cannot_be_read(buckets: tuple[int, ...]) -> None:
    sample = {"labels": (), "value": 1.0, "buckets": buckets}
    wrong = {"name": "took", "kind": "histogram", "help": "", "labels": (), "samples": [sample], "bounds": [1.0]}
    with pytest.raises(msgspec.ValidationError, match="took"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=Family)


class TestFolding:
    def test_counters_and_histograms_add_up_and_gauges_follow_their_fold(self) -> None:
        def part(number: float) -> list[Family]:
            return [
                Family("done", "counter", "", ("topic",), (Sample(("a",), number), Sample((str(number),), 1))),
                Family("open", "gauge", "", (), (Sample((), number),)),
                Family("age", "gauge", "", (), (Sample((), number),), fold="max"),
                Family("took", "histogram", "", (), (Sample((), number, (1, 2)),), bounds=(1.0,)),
            ]

        done, opened, age, took = folded([part(1), part(5), []])
        assert {sample.labels: sample.value for sample in done.samples} == {("a",): 6, ("1",): 1, ("5",): 1}
        assert opened.samples[0].value == 6
        assert age.samples[0].value == 5
        assert took.samples[0] == Sample((), 6, (2, 4))

    @pytest.mark.parametrize(
        "newer",
        [
            Family("took", "histogram", "", (), (Sample((), 2.0, (0, 1, 0)),), bounds=(1.0, 2.0)),
            Family("took", "histogram", "", ("topic",), (Sample(("a",), 2.0, (0, 1)),), bounds=(1.0,)),
            Family("took", "counter", "", (), (Sample((), 2.0),)),
        ],
    )
    def test_the_newer_shape_of_a_family_replaces_the_older(self, newer: Family) -> None:
        older = Family("took", "histogram", "", (), (Sample((), 1.0, (1, 0)),), bounds=(1.0,))
        other = Family("done", "counter", "", (), (Sample((), 1.0),))
        assert folded([[older, other], [newer], [newer, other]]) == [
            *folded([[newer], [newer]]),
            *folded([[other], [other]]),
        ]


class TestFigures:
    def test_of_a_handler(self) -> None:
        values = parsed(exposition(figures([reading(filtered=4)])))
        labels = "[('group', 'billing'), ('topic', 'orders')]"
        expected = {
            "onward_engine_workers": 100,
            "onward_engine_busy": 12,
            "onward_engine_restarted_total": 0,
            "onward_engine_oldest_running_seconds": 0.42,
            "onward_events_done_total": 12_345,
            "onward_events_dead_total": 0,
            "onward_events_filtered_total": 4,
            "onward_lag_open": 30,
            "onward_lag_oldest_open_seconds": 1.5,
        }
        assert {name: values[f"{name}{labels}"] for name in expected} == expected

    def test_every_family_exists_before_there_is_a_handler(self) -> None:
        text = exposition(figures([]), prefix="shop")
        assert text.count("# TYPE shop_") == text.count("# HELP shop_") == 29
        assert parsed(text) == {}

    def test_an_unknown_value_is_left_out_and_not_0(self) -> None:
        labels = "[('group', 'billing'), ('topic', 'orders')]"
        values = parsed(exposition(figures([reading()])))
        assert f"onward_lag_undelivered{labels}" not in values
        assert f"onward_dead_letters{labels}" not in values
        known = parsed(exposition(figures([reading(undelivered=0, dead_letters=3, oldest_open_s=None)])))
        assert known[f"onward_lag_undelivered{labels}"] == 0
        assert known[f"onward_dead_letters{labels}"] == 3
        assert known[f"onward_lag_oldest_open_seconds{labels}"] == 0

    def test_of_a_partition(self) -> None:
        idle = {"blocking_position": None, "blocking_state": None, "blocking_attempt": None, "blocked_s": 0.0}
        parts = [partition(3), partition(4, undelivered=None, lag=None, **idle)]
        values = parsed(exposition(figures([reading(*parts)])))
        found = {name: value for name, value in values.items() if name.startswith("onward_partition_")}
        three, four = ([("group", "billing"), ("partition", n), ("topic", "orders")] for n in "34")
        assert found == {
            f"onward_partition_undelivered{three}": 5,
            f"onward_partition_open{three}": 3,
            f"onward_partition_gap{three}": 2,
            f"onward_partition_lag{three}": 10,
            f"onward_partition_blocking_position{three}": 7,
            f"onward_partition_blocked_seconds{sorted([*three, ('status', 'running')])}": 1.5,
            f"onward_partition_open{four}": 3,
            f"onward_partition_gap{four}": 2,
        }

    def test_a_large_position_is_not_rounded(self) -> None:
        position = (1_700_000_000_000 << 21) | 7
        text = exposition(figures([reading(partition(blocking_position=position))]))
        assert f"}} {position}\n" in text

    def test_readings_survive_json(self) -> None:
        one = reading(partition())
        assert msgspec.json.decode(msgspec.json.encode(one), type=type(one)) == one


def test_the_first_metrics_import_no_client_library() -> None:
    code = """
import sys
from onward import Onward
Onward('sqlite:///unused.db').metrics()
print('prometheus_client' in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"
