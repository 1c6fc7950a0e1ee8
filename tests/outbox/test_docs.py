"""The example of the page is the file in examples/, and it runs."""

from pathlib import Path

from tests.examples import said_by, shown, source


def test_the_page_shows_the_example() -> None:
    assert shown("docs/outbox.md") == source("outbox.py")


def test_the_example_handles_the_events_of_its_orders(tmp_path: Path) -> None:
    said = said_by("outbox.py", tmp_path, lambda text: text.count("pays") == 3)
    assert sorted(said.split("\n"))[1:] == ["ann pays", "bob pays", "cleo pays"]
