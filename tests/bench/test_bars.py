"""The chart of the README is drawn from the results of the benchmark."""

from bench.bars import Figure, Results, rates, svg


def test_the_chart_shows_the_median_of_each_contestant() -> None:
    figures = [
        Figure("Kafka, typed no-op, key order", {"onward": [3e4, 1e4, 2e4], "FastStream": [5e3, 4e3, 6e3]}),
        Figure("Kafka, typed no-op, key order", {"onward": [3e4, 1e4, 2e4], "onward_mb": [100, 100, 100]}),
        Figure("Kafka, peak memory", {"onward": [1.0]}),
    ]
    rows = rates(Results(figures))
    assert rows == {"Onward": 2e4, "FastStream": 5e3}
    assert "20,000/s" in svg(rows)
    assert "5,000/s" in svg(rows)
