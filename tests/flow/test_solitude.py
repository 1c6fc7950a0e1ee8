"""What is charged with a crash runs alone in its whole process, which may have several handlers."""

from random import Random

import pytest
from tests.flow.driver import Driver, P, stored

from onward.brokers.base import Tries
from onward.flow.solitude import Solitude

ALONE = 5  # how many of the first positions of each handler are suspected


def pair(**limits: object) -> tuple[Driver, Driver]:
    solitude = Solitude()
    one, two = Driver(solitude, **limits), Driver(solitude, **limits)
    return one, two


def suspected(*positions: int) -> dict[int, Tries]:
    return {position: Tries(0, 1) for position in positions}


def advance(drivers: tuple[Driver, ...], seconds: float = 0.1) -> None:
    """One clock for all of them; each is called when it asked for it."""
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

    def test_two_who_ask_take_turns(self) -> None:
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

    def test_a_lost_partition_gives_it_back(self) -> None:
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

    def test_an_ownership_that_is_not_sure_does_not_stop_the_others(self) -> None:
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
def test_who_is_suspected_runs_alone_and_everything_ends(seed: int) -> None:
    rng, solitude = Random(seed), Solitude()
    drivers = tuple(Driver(solitude, concurrency=rng.choice((1, 4))) for _ in range(rng.choice((2, 3))))
    for driver in drivers:
        own(driver)
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
    assert [driver.plane.open for driver in drivers] == [0] * len(drivers)


def own(driver: Driver) -> None:
    before = driver.progress.get(P) or stored(0)
    start = before.watermark
    again = stored(start, *before.done_above, tries=suspected(*range(start, start + ALONE)))
    driver.assign(stored=again, unclean=True)
    driver.inherited[P] = again


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
    alone = [(d, each) for d, each in runs if each.position < ALONE and each.attempt == 1]
    assert not alone or len(runs) == 1, f"{alone[0][1].position} does not run alone"
