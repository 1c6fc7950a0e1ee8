"""Exit codes, and the decisions of a supervisor."""

from pathlib import Path
from typing import NamedTuple

from onward.cli.policy import (
    INTERRUPTED,
    NO,
    OK,
    UNREACHABLE,
    USAGE,
    End,
    Record,
    Stall,
    after,
    delay_s,
    exit_code,
    is_hopeless,
)
from onward.cli.say import Misuse
from onward.errors import (
    Backlogged,
    BadHandler,
    BadSetting,
    BadStore,
    BrokerError,
    GroupDropped,
    HandlerTimeout,
    MissingExtra,
    PublishError,
    TooLarge,
    Unserialisable,
)

CRASH_AT_START = End(code=1, lived_s=0.2, greeted=False)
CRASH_AFTER_HELLO = End(code=-9, lived_s=0.2, greeted=True)
CRASH_LATER = End(code=1, lived_s=5.0, greeted=True)
KILLED_AFTER_DAYS = End(code=-9, lived_s=200_000.0, greeted=True)
BAD_MODULE = End(code=2, lived_s=3.0, greeted=False)


def run_through(*ends: End) -> Record:
    record = Record()
    for end in ends:
        record = after(record, end)
    return record


def hopeless(*ends: End, ever_worked: bool = False, others_work: bool = False) -> bool:
    record = run_through(*ends)
    return is_hopeless(record, ends[-1], limit=3, ever_worked=ever_worked, others_work=others_work)


def test_every_error_of_onward_has_an_exit_code() -> None:
    table = {
        OK: (),
        NO: (Backlogged, GroupDropped, HandlerTimeout),
        USAGE: (BadSetting, BadHandler, MissingExtra, Unserialisable, TooLarge, Misuse),
        UNREACHABLE: (BrokerError, BadStore, PublishError),
        INTERRUPTED: (KeyboardInterrupt,),
    }
    assert list(table) == [0, 1, 2, 3, 130]
    for code, kinds in table.items():
        assert {exit_code(kind("why")) for kind in kinds} <= {code}


def test_the_exit_codes_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "start.md").read_text()
    for code in (OK, NO, USAGE, UNREACHABLE, INTERRUPTED):
        assert f"\n| {code} |" in page


class TestDelay:
    def test_the_first_death_is_replaced_at_once(self) -> None:
        assert delay_s(run_through(KILLED_AFTER_DAYS)) == 0.0
        assert delay_s(run_through(CRASH_LATER)) == 0.0

    def test_a_failed_start_waits_a_little(self) -> None:
        assert delay_s(run_through(CRASH_AT_START)) == 0.25

    def test_doubles_with_each_death_up_to_a_limit(self) -> None:
        delays = [delay_s(run_through(*[CRASH_LATER] * times)) for times in (2, 3, 4, 5_000)]
        assert delays == [0.25, 0.5, 1.0, 30.0]
        assert [delay_s(run_through(*[CRASH_AT_START] * times)) for times in (2, 3, 5_000)] == [0.5, 1.0, 30.0]

    def test_a_long_life_clears_the_record(self) -> None:
        assert delay_s(run_through(CRASH_LATER, CRASH_LATER, KILLED_AFTER_DAYS)) == 0.0


class TestGivingUp:
    def test_after_three_failed_starts(self) -> None:
        assert not hopeless(CRASH_AT_START, CRASH_AT_START)
        assert hopeless(CRASH_AT_START, CRASH_AT_START, CRASH_AT_START)

    def test_only_after_failed_starts_in_a_row(self) -> None:
        assert not hopeless(CRASH_AT_START, CRASH_AT_START, CRASH_LATER, CRASH_AT_START)

    def test_never_for_later_crashes(self) -> None:
        assert not hopeless(*[CRASH_LATER] * 10)
        assert not hopeless(*[CRASH_AFTER_HELLO] * 10), "an event may kill each process as soon as it starts"

    def test_a_late_crash_without_a_hello_is_still_a_failed_start(self) -> None:
        assert CRASH_AT_START._replace(lived_s=20.0).at_start

    def test_never_for_a_broker_that_is_away(self) -> None:
        """Some brokers are asked when they are opened, others only when the first handler joins its group."""
        away = CRASH_AT_START._replace(code=UNREACHABLE)
        assert not hopeless(*[away] * 10)
        assert not hopeless(*[away._replace(greeted=True)] * 10)

    def test_at_once_when_the_module_is_bad(self) -> None:
        assert hopeless(BAD_MODULE)
        assert hopeless(BAD_MODULE._replace(greeted=True)), "a mistake may be noticed only when it subscribes"
        assert not hopeless(BAD_MODULE, ever_worked=True)

    def test_never_for_an_event_that_ends_its_process_with_exit_code_2(self) -> None:
        assert not hopeless(*[BAD_MODULE._replace(greeted=True)] * 10, ever_worked=True)

    def test_never_while_others_work(self) -> None:
        assert not hopeless(*[CRASH_AT_START] * 10, ever_worked=True, others_work=True)


class Holder(NamedTuple):
    pid: int
    since: float


class TestStall:
    def look(self, *looks: tuple[Holder, float]) -> list[bool]:
        stall = Stall(limit_s=5.0)
        return [stall.look(holder, now) for holder, now in looks]

    def test_one_holder_over_the_limit(self) -> None:
        stuck = Holder(7, since=100.0)
        assert self.look((stuck, 103.0), (stuck, 104.9), (stuck, 105.1)) == [False, False, True]

    def test_a_process_that_locks_again_and_again_is_not_stuck(self) -> None:
        assert not any(self.look(*[(Holder(7, since=now), now + 0.1) for now in range(100, 120)]))

    def test_the_time_of_a_suspended_machine_does_not_count(self) -> None:
        before, after_sleep = Holder(7, since=100.0), (Holder(7, since=4_000.0), 4_000.1)
        assert self.look((before, 100.5), (before, 4_000.0), after_sleep) == [False, False, False]


def test_an_end_is_described_in_words() -> None:
    assert str(KILLED_AFTER_DAYS) == "was killed by SIGKILL"
    assert str(End(code=-63, lived_s=1.0, greeted=True)) == "was killed by signal 63"
    assert str(CRASH_AT_START) == "ended with exit code 1"
