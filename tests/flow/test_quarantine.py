"""An event that is suspected of a crash runs alone in its process, also if that has several handlers."""

from random import Random

import pytest
from tests.flow.driver import Driver, P, stored

from onward.brokers.base import Tries
from onward.flow.quarantine import Quarantine


def pair(**limits: object) -> tuple[Driver, Driver]:
    quarantine = Quarantine()
    one, two = Driver(quarantine, **limits), Driver(quarantine, **limits)
    return one, two


def suspected(*positions: int) -> dict[int, Tries]:
    return {position: Tries(0, 1) for position in positions}


def advance(drivers: tuple[Driver, ...], seconds: float = 0.1) -> None:
    """Move one clock for all drivers. Each is ticked when it asked for it."""
    until = max(driver.now for driver in drivers) + seconds
    for driver in drivers:
        driver.wait(until - driver.now)


class TestTwoHandlers:
    def test_a_suspect_waits_until_the_other_handler_runs_nothing(self) -> None:
        one, two = pair()
        two.assign()
        two.deliver("a")
        one.assign(stored=stored(0, tries=suspected(0)), unclean=True)
        one.deliver("a")
        assert one.running() == []
        two.done(0)
        advance((one, two))
        assert one.running() == [0]

    def test_the_other_handler_starts_nothing_until_its_end_is_recorded(self) -> None:
        one, two = pair()
        one.assign(stored=stored(0, tries=suspected(0)), unclean=True)
        one.deliver("a")
        two.assign()
        two.deliver("a")
        assert (one.running(), two.running()) == ([0], [])
        one.done(0)
        advance((one, two))
        assert two.running() == [0]

    def test_two_handlers_with_suspects_take_turns(self) -> None:
        one, two = pair()
        for driver in (one, two):
            driver.assign(stored=stored(0, tries=suspected(0, 1)), unclean=True)
            driver.deliver("a", "b")
        order = []
        for _ in range(4):
            for _ in range(5):
                advance((one, two), 0.02)
            running = one if one.runs else two
            order.append(running)
            running.done(running.running()[0])
        assert order == [one, two, one, two]

    def test_losing_the_partition_gives_the_quarantine_back(self) -> None:
        one, two = pair()
        two.assign()
        two.deliver("a")
        one.assign(stored=stored(0, tries=suspected(0)), unclean=True)
        one.deliver("a")
        two.done(0)
        one.fence(P)
        two.deliver("b")
        advance((one, two))
        assert two.running() == [1]

    def test_a_handler_that_has_stopped_is_not_waited_for(self) -> None:
        one, two = pair()
        two.assign()
        two.deliver("a")
        one.assign(stored=stored(0, tries=suspected(0)), unclean=True)
        one.deliver("a")
        two.plane.leave()
        advance((one,))
        assert one.running() == [0]

    def test_a_handler_that_has_stopped_asks_for_nothing(self) -> None:
        one, two = pair()
        one.assign(stored=stored(0, tries=suspected(0)), unclean=True)
        one.deliver("a")
        one.plane.leave()
        two.assign()
        two.deliver("a")
        assert two.running() == [0]

    def test_a_handler_with_uncertain_ownership_does_not_stop_the_others(self) -> None:
        one, two = pair()
        two.assign()
        two.deliver("a")
        one.assign(stored=stored(0, tries=suspected(0)), unclean=True)
        one.deliver("a")
        one.sure_until = one.now
        one.turn()
        two.deliver("b")
        advance((one, two))
        assert two.running() == [0, 1]


@pytest.mark.parametrize("seed", range(60))
def test_suspects_run_alone_and_everything_ends(seed: int) -> None:
    play(seed)


def test_mutant_does_not_wait_for_the_other_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quarantine, "granted", lambda quarantine, member: not quarantine.barred(member))
    assert notices("does not run alone")


def test_mutant_starts_beside_a_lone_run_of_another_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quarantine, "barred", lambda *_: False)
    assert notices("does not run alone")


def test_mutant_never_gives_the_quarantine_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quarantine, "give_back", lambda *_: None)
    assert notices("left open")


def notices(what: str) -> bool:
    for seed in range(60):
        try:
            play(seed)
        except AssertionError as error:
            return what in str(error)
    return False


def play(seed: int) -> None:
    rng, quarantine = Random(seed), Quarantine()
    drivers = tuple(Driver(quarantine, concurrency=rng.choice((1, 4))) for _ in range(rng.choice((2, 3))))
    for driver in drivers:
        own(driver, rng.choice((0, 2, 5)))
        driver.deliver(*rng.choices("abcdef", k=rng.randint(1, 12)))
    for _ in range(60):
        act(rng, rng.choice(drivers))
        advance(drivers, rng.choice((0.0, 0.05, 0.5)))
        check(drivers)
    for _ in range(200):
        for driver in drivers:
            if driver.runs:
                driver.done(driver.running()[0])
        advance(drivers)
        check(drivers)
    assert not any(driver.plane.open for driver in drivers), "left open"


def own(driver: Driver, suspects: int) -> None:
    driver.assign(stored=stored(0, tries=suspected(*range(suspects))), unclean=True)


def act(rng: Random, driver: Driver) -> None:
    what = rng.random()
    if what < 0.5 and driver.runs:
        driver.done(rng.choice(driver.running()))
    elif what < 0.7 and P in driver.owned:
        driver.deliver(*rng.choices("abcdef", k=rng.randint(1, 4)))
    elif what < 0.8 and driver.runs:
        driver.again(rng.choice(driver.running()), in_s=rng.choice((0.0, 0.1)))


def check(drivers: tuple[Driver, ...]) -> None:
    runs = [(driver, delivery) for driver in drivers for delivery in driver.runs.values()]
    for driver, each in runs:
        before = driver.inherited[P]
        alone = before is not None and each.position in before.tries and each.attempt == 1
        assert not alone or len(runs) == 1, f"{each.position} does not run alone"
