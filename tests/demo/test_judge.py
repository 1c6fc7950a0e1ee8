"""The judge must find every lost, inverted or repeated order, whatever the cause."""

import ast
import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.demo import effects, judge
from onward.demo.check import judged
from onward.demo.judge import Balance, Judge

ORDERS = """
CREATE TABLE orders (number INTEGER PRIMARY KEY, customer TEXT, n INTEGER, amount INTEGER, poison INTEGER, placed REAL);
"""


class Books:
    """The tables of the shop and the workers, written by hand."""

    def __init__(self, folder: Path) -> None:
        self.orders = sqlite3.connect(folder / "orders.db", isolation_level=None)
        self.orders.executescript(ORDERS)
        effects.create(folder)
        self.effects = effects.connect(folder)

    def publish(self, number: int, customer: str, n: int, *, poison: bool = False) -> None:
        self.orders.execute("INSERT INTO orders VALUES (?, ?, ?, 100, ?, 0)", (number, customer, n, poison))

    def handle(self, number: int, outcome: str = "done") -> None:
        customer, n = self.orders.execute("SELECT customer, n FROM orders WHERE number = ?", (number,)).fetchone()
        self.record(number, customer, n, outcome)

    def record(self, number: int, customer: str, n: int, outcome: str = "done") -> None:
        self.effects.execute(
            "INSERT INTO effects (time, worker, pid, number, customer, n, attempt, waited_s, outcome)"
            " VALUES (0, 1, 1, ?, ?, ?, 1, 0.0, ?)",
            (number, customer, n, outcome),
        )


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    books = Books(tmp_path)
    for number in range(1, 7):  # two customers take turns
        books.publish(number, "ab"[number % 2], (number + 1) // 2)
    yield books
    books.orders.close()
    books.effects.close()


def verdict(folder: Path, *dead: int) -> Balance:
    with contextlib.closing(Judge(folder)) as judge:
        judge.read()
        judge.bury(dead)
        return judge.verdict()


def test_orders_of_different_customers_may_overtake_each_other(tmp_path: Path, books: Books) -> None:
    for number in (2, 1, 4, 6, 3, 5):  # customers overtake each other freely
        books.handle(number)
    assert verdict(tmp_path) == Balance(6, 6, 0, 0, 0, 0, 0)


def test_a_lost_order_is_named(tmp_path: Path, books: Books) -> None:
    for number in (1, 2, 4, 5, 6):
        books.handle(number)
    assert verdict(tmp_path) == Balance(6, 5, 0, 0, lost=1, inverted=0, duplicates=0)
    with contextlib.closing(Judge(tmp_path)) as judge:
        judge.read()
        assert judge.missing() == [3]


def test_an_order_that_only_failed_is_lost(tmp_path: Path, books: Books) -> None:
    for number in (1, 2, 3, 4, 5):
        books.handle(number)
    books.handle(6, "failed")
    assert verdict(tmp_path).lost == 1


def test_a_first_completion_after_a_later_one_is_an_inversion(tmp_path: Path, books: Books) -> None:
    for number in (2, 4, 6, 5, 1, 3):  # customer b: 3, 1, 2
        books.handle(number)
    assert verdict(tmp_path) == Balance(6, 6, 0, 0, 0, inverted=2, duplicates=0)


def test_a_repeated_order_is_a_duplicate_and_no_inversion(tmp_path: Path, books: Books) -> None:
    for number in (1, 2, 3, 1, 3, 5, 4, 6, 6):
        books.handle(number)
    assert verdict(tmp_path) == Balance(6, 6, 0, 0, 0, 0, duplicates=3)


def test_dead_letters_are_counted_and_may_be_overtaken(tmp_path: Path, books: Books) -> None:
    books.publish(7, "a", 4, poison=True)
    books.publish(8, "a", 5)
    for number in (1, 2, 3, 4, 5, 6, 8):
        books.handle(number)
    assert verdict(tmp_path, 7) == Balance(8, 7, dead=1, in_flight=0, lost=0, inverted=0, duplicates=0)
    assert verdict(tmp_path).lost == 1


def test_a_good_order_among_the_dead_letters_is_reported(tmp_path: Path, books: Books) -> None:
    books.publish(7, "a", 4, poison=True)
    with contextlib.closing(Judge(tmp_path)) as judge:
        judge.read()
        judge.bury([5, 7])
        assert judge.wrongly_dead() == [5]


def test_an_order_that_was_handled_but_never_committed_is_reported(tmp_path: Path, books: Books) -> None:
    for number in range(1, 7):
        books.handle(number)
    books.record(7, "a", 4)
    with contextlib.closing(Judge(tmp_path)) as judge:
        judge.read()
        assert judge.verdict() == Balance(6, 6, 0, 0, 0, 0, 0)
        assert judge.unknown() == [7]
    _, reasons = judged(tmp_path, ())
    assert reasons == ["1 orders were handled that the shop never committed: 7"]


def test_an_effect_that_is_read_before_its_order_counts_with_the_order(tmp_path: Path, books: Books) -> None:
    for number in range(1, 7):
        books.handle(number)
    books.record(7, "a", 4)
    with contextlib.closing(Judge(tmp_path)) as judge:
        judge.read()
        books.publish(7, "a", 4)
        judge.read()
        assert judge.balance() == Balance(7, 7, 0, 0, 0, 0, 0)
        assert not judge.unknown()


def test_the_orders_may_be_in_the_file_of_the_broker(tmp_path: Path, books: Books) -> None:
    books.handle(1)
    (tmp_path / "orders.db").rename(tmp_path / "events.db")
    assert verdict(tmp_path).published == 6


def test_while_it_runs_an_open_order_is_in_flight_and_a_long_overtaken_one_is_lost(
    tmp_path: Path, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    books.handle(1)
    books.handle(5)  # customer b's second order, number 3, was overtaken
    with contextlib.closing(Judge(tmp_path)) as watching:
        watching.read()
        assert watching.overtaken
        assert watching.balance() == Balance(6, 2, 0, in_flight=4, lost=0, inverted=0, duplicates=0)
        later = time.time() + judge.LOST_AFTER_S + 1
        monkeypatch.setattr(time, "time", lambda: later)
        assert watching.balance() == Balance(6, 2, 0, in_flight=3, lost=1, inverted=0, duplicates=0)
        books.handle(3)  # handled after all, but too late
        watching.read()
        assert watching.balance() == Balance(6, 3, 0, in_flight=3, lost=0, inverted=1, duplicates=0)


@pytest.mark.parametrize("module", [effects, judge])
def test_the_judge_imports_nothing_of_onward(module: object) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.startswith(("onward", "."))]
