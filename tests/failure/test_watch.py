"""When dead letters cause an alert."""

from onward.failure.watch import Alert, AlertState, Tally, Thresholds


def kinds(alerts: list[Alert]) -> list[str]:
    return [alert.kind for alert in alerts]


def depths(state: AlertState, *values: int) -> list[list[str]]:
    return [kinds(state.see([Tally("orders", "billing", value)])) for value in values]


def test_one_alert_above_the_threshold_and_one_all_clear_well_below_it() -> None:
    alerts = depths(AlertState(Thresholds()), 0, 100, 101, 250, 99, 71, 101, 70, 101)
    assert alerts == [[], [], ["high"], [], [], [], [], ["recovered"], ["high"]]


def test_a_threshold_of_zero_alerts_on_the_first_letter_and_clears_after_the_last() -> None:
    assert depths(AlertState(Thresholds(depth=0)), 0, 1, 2, 1, 0, 3) == [[], ["high"], [], [], ["recovered"], ["high"]]


def test_the_alert_has_the_number_the_growth_the_age_and_a_command() -> None:
    state = AlertState(Thresholds(depth=100))
    state.see([Tally("orders", "billing", 40)])
    (alert,) = state.see([Tally("orders", "billing", 1_140, oldest_age_s=7_200)])
    assert alert.text == (
        "orders: 1,140 dead letters of group billing (dead_threshold=100), +1,100 since the last check, the oldest "
        "2.0 h old; see: onward dead list --topic orders --group billing"
    )


def test_growth_and_age_have_their_own_limits() -> None:
    state = AlertState(Thresholds(depth=None, growth=10, oldest_age_s=60))
    assert depths(state, 5, 15, 26, 30) == [[], [], ["high"], ["recovered"]]
    old = [Tally("orders", "billing", 30, oldest_age_s=age) for age in (60, 61, 50, 0)]
    assert [kinds(state.see([each])) for each in old] == [[], ["high"], [], ["recovered"]]


def test_each_topic_and_group_has_its_own_alerts() -> None:
    state = AlertState(Thresholds())
    many, few = Tally("orders", "billing", 500), Tally("orders", "mailing", 3)
    assert kinds(state.see([many, few])) == ["high"]
    assert kinds(state.see([many, Tally("orders", "mailing", 101)])) == ["high"]


def test_alerts_of_groups_that_another_process_counts_now_are_forgotten() -> None:
    state = AlertState(Thresholds())
    assert depths(state, 500) == [["high"]]
    assert state.see([]) == []
    assert depths(state, 500) == [["high"]], "we count it again, so the alert is repeated"


def test_a_check_that_fails_is_an_alert_and_its_end_an_all_clear() -> None:
    state = AlertState(Thresholds())
    depths(state, 500)
    assert [alert.text for alert in state.fail("disk full")] == ["the dead letters cannot be counted: disk full"]
    assert state.fail("disk full") == []
    assert depths(state, 500, 20) == [["repaired"], ["recovered"]], "the alert from before the failure is remembered"
