"""The partitions and messages of a member, without a broker."""

import math

from onward.brokers.base import Assigned, Fenced, Moved, Progress, Reached, Revoked, State
from onward.brokers.core.bell import Bell
from onward.brokers.core.holdings import Chunk, Hold, Holdings
from onward.event import Delivery, Event, Partition

NOW = 10.0
GAP = 1_000_000


def hold(index: int = 0, *, epoch: int = 1, ready_at: float = 0.0) -> Hold[None]:
    return Hold(Assigned(Partition("orders", index), epoch, 1, "log", None, False), None, position=0, ready_at=ready_at)


def chunk(of: Hold[None], *positions: int, size: int = 1) -> Chunk:
    events = [Event(str(position), "orders", "k", b"x" * size) for position in positions]
    deliveries = [Delivery(event, of.partition, int(event.id), of.epoch) for event in events]
    return Chunk(deliveries, sum(event.size for event in events))


def holding(*holds: Hold[None]) -> Holdings[None]:
    """Holdings with these ownerships, all announced."""
    holdings: Holdings[None] = Holdings(Bell())
    for each in holds:
        holdings.add(each)
    holdings.collect(0, 1, NOW, sure=True)
    return holdings


def positions(messages: list[object]) -> list[int]:
    return [each.position for each in messages if isinstance(each, Delivery)]


def test_an_ownership_is_announced_at_its_time_and_before_its_events() -> None:
    holdings: Holdings[None] = Holdings(Bell())
    mine = hold(ready_at=NOW + 1)
    holdings.add(mine)
    holdings.stock([(mine, chunk(mine, 0, GAP))])
    assert holdings.collect(10, 100, NOW, sure=True) == []
    assert holdings.ripe_at() == NOW + 1
    messages = holdings.collect(10, 100, NOW + 1, sure=True)
    assert messages[0] == mine.assigned
    assert positions([*messages]) == [0, GAP]


def test_while_ownership_is_uncertain_only_losses_are_reported() -> None:
    mine, lost = hold(0), hold(1)
    holdings = holding(mine, lost)
    holdings.stock([(mine, chunk(mine, 0))])
    holdings.add(hold(2))
    holdings.drop([lost], fenced=True)
    assert holdings.collect(10, 100, NOW, sure=False) == [Fenced([lost.partition])]
    messages = holdings.collect(10, 100, NOW, sure=True)
    assert [type(each) for each in messages] == [Assigned, Delivery]


def test_a_loss_is_unreported_until_it_is_collected() -> None:
    mine = hold()
    holdings = holding(mine)
    unreported = [holdings.has_unreported_loss]
    holdings.drop([mine], fenced=True)
    unreported.append(holdings.has_unreported_loss)
    holdings.collect(0, 0, NOW, sure=True)
    unreported.append(holdings.has_unreported_loss)
    assert unreported == [False, True, False]


def test_the_loss_of_an_ownership_that_was_never_announced_is_not_reported() -> None:
    holdings: Holdings[None] = Holdings(Bell())
    mine = hold(ready_at=NOW + 1)
    holdings.add(mine)
    holdings.drop([mine], fenced=True)
    assert holdings.collect(10, 100, NOW + 2, sure=True) == []


def test_collect_respects_its_limits_but_returns_at_least_one_event() -> None:
    mine = hold()
    holdings = holding(mine)
    holdings.stock([(mine, chunk(mine, *range(5), size=100))])
    assert positions([*holdings.collect(2, 10_000, NOW, sure=True)]) == [0, 1]
    assert positions([*holdings.collect(10, 1, NOW, sure=True)]) == [2]
    assert positions([*holdings.collect(10, 10_000, NOW, sure=True)]) == [3, 4]
    assert not holdings.collect(10, 10_000, NOW, sure=True)
    assert (mine.ahead.events, mine.ahead.bytes) == (0, 0)


def test_partitions_take_turns() -> None:
    holds = [hold(index) for index in range(3)]
    holdings = holding(*holds)
    for each in holds:
        holdings.stock([(each, chunk(each, *range(10)))])
    first = [
        next(each.partition.index for each in holdings.collect(1, 100, NOW, sure=True) if isinstance(each, Delivery))
        for _ in range(3)
    ]
    assert sorted(first) == [0, 1, 2]


def test_gaps_are_reported_between_the_events_around_them() -> None:
    mine = hold()
    holdings = holding(mine)
    holdings.stock([(mine, chunk(mine, 0))], [(mine, 5 * GAP)])
    holdings.stock([(mine, chunk(mine, 5 * GAP))])
    messages = holdings.collect(10, 100, NOW, sure=True)
    assert messages[1] == Reached(mine.partition, mine.epoch, 5 * GAP)
    assert positions([*messages]) == [0, 5 * GAP]
    assert mine.ahead.next_out == 5 * GAP + 1


def test_paused_and_throttled_partitions_keep_their_events() -> None:
    mine = hold()
    holdings = holding(mine)
    holdings.stock([(mine, chunk(mine, 0))])
    holdings.set_paused([mine.partition], paused=True)
    assert not holdings.collect(10, 100, NOW, sure=True)
    holdings.set_paused([mine.partition], paused=False)
    holdings.throttle(mine, throttled=True)
    assert not holdings.collect(10, 100, NOW, sure=True)
    holdings.throttle(mine, throttled=False)
    assert positions([*holdings.collect(10, 100, NOW, sure=True)]) == [0]


def test_a_revoked_partition_delivers_no_event_and_its_deadline_starts_with_the_receipt() -> None:
    mine = hold()
    holdings = holding(mine)
    holdings.stock([(mine, chunk(mine, 0))])
    holdings.revoke([mine], grace_s=5.0)
    assert holdings.deadline == math.inf, "the message was not received yet"
    assert holdings.collect(10, 100, NOW, sure=True) == [Revoked([mine.partition], 5.0)]
    assert holdings.deadline == NOW + 5.0
    holdings.stock([(mine, chunk(mine, 1))])
    assert not holdings.collect(10, 100, NOW, sure=True)
    holdings.drop([mine], fenced=False)
    assert holdings.deadline == math.inf


def test_a_fixed_deadline_is_not_prolonged_by_a_late_receipt() -> None:
    mine = hold()
    holdings = holding(mine)
    holdings.revoke([mine], grace_s=5.0, deadline=NOW + 5.0)
    assert holdings.collect(0, 0, NOW + 2.0, sure=True) == [Revoked([mine.partition], 3.0)]
    assert holdings.deadline == NOW + 5.0


def test_a_withheld_ownership_is_not_announced_and_an_announced_one_cannot_be_withheld() -> None:
    holdings: Holdings[None] = Holdings(Bell())
    mine = hold()
    holdings.add(mine)
    assert holdings.withhold(mine)
    assert not holdings.collect(0, 0, NOW, sure=True)
    holdings.restore()
    assert holdings.collect(0, 0, NOW, sure=True) == [mine.assigned]
    assert not holdings.withhold(mine)


def test_progress_of_an_old_epoch_is_reported_as_lost() -> None:
    mine, other = hold(0, epoch=2), hold(1)
    holdings = holding(mine, other)
    old = Progress(mine.partition, 1, 5)
    holds, lost = holdings.settleable([old, Progress(other.partition, 1, 5)], ())
    assert list(holds) == [other.partition]
    assert list(lost) == [mine.partition]


def test_moves_are_reported_only_to_the_ownership_of_their_epoch() -> None:
    mine = hold(epoch=2)
    holdings = holding(mine)
    holdings.report(Moved(mine.partition, 1, ["old"], State.WAITING, None))
    holdings.report(Moved(mine.partition, 2, ["new"], State.WAITING, None))
    assert [each.ids for each in holdings.collect(0, 0, NOW, sure=True) if isinstance(each, Moved)] == [["new"]]


def test_a_reader_pauses_when_it_has_read_twice_the_limit_of_a_receive() -> None:
    mine = hold()
    holdings = holding(mine)
    holdings.collect(1_000, 1 << 20, NOW, sure=True)
    holdings.stock([(mine, chunk(mine, *range(2_000)))])
    assert not holdings.hungry.is_set()
    assert len(holdings.collect(1_000, 1 << 20, NOW, sure=True)) == 1_000
    assert holdings.hungry.is_set()


def test_closed_holdings_return_no_messages() -> None:
    mine = hold()
    holdings = holding(mine)
    holdings.stock([(mine, chunk(mine, 0))])
    holdings.close()
    assert holdings.collect(10, 100, NOW, sure=True) == []
