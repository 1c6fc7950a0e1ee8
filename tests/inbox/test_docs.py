"""The example of the page is the file in examples/, and it runs."""

from pathlib import Path

from tests.examples import said_by, shown, source


def test_the_pages_example_is_the_one_in_examples() -> None:
    assert shown("docs/inbox.md") == source("inbox.py")


def test_the_pages_example_runs(tmp_path: Path) -> None:
    output = said_by("inbox.py", tmp_path, lambda text: text.count("\n") >= 10)
    assert sorted(output.splitlines()) == [f"billed order {n}" for n in range(10)]
