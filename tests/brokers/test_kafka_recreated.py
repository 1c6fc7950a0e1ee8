"""A topic deleted and made anew, a clock that was ahead: what stood aside is not lost, and keeps nothing new from its
handlers."""

import time
from types import SimpleNamespace

import pytest

from onward.brokers.base import AsideRecord, State
from onward.brokers.kafka import marks
from onward.testing.aside import make_record
from onward.testing.harness import Member
from tests.brokers.kafka import KafkaHarness, harness
from tests.brokers.kafka_stage import play, staged

__all__ = ["harness"]

_DAY_S = 86_400.0


def set_aside(member: Member, group: str, at: int, state: State) -> AsideRecord:
    """The record of what the member received at this place."""
    delivery = member.deliveries[at]
    return make_record(delivery, member.assigned[delivery.partition].log_id, state, group=group)


def test_a_clock_that_was_ahead_voids_no_record_of_a_later_owner(
    harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's offsets are reset, and with them goes the number of the owner whose clock was ahead."""

    async def scene() -> None:
        async with staged(harness) as stage:
            await stage.publish(4)
            with monkeypatch.context() as ahead:
                ahead.setattr(marks, "time", SimpleNamespace(time=lambda: time.time() + _DAY_S))
                first = await stage.member()
                await first.take(4)
            (before,) = first.assigned.values()
            old = set_aside(first, stage.group, 0, State.DEAD)
            await first.subscription.settle(first.progress(), aside=[old])
            await first.release(list(first.assigned))
            await first.subscription.close()
            stage.reset(2)
            second = await stage.member()
            await second.take(2)
            (after,) = second.assigned.values()
            assert (after.fence or 0) > (before.fence or 0)
            new = set_aside(second, stage.group, 0, State.DEAD)
            assert not await second.subscription.settle(second.progress(), aside=[new])
            assert [each.id for each in await stage.letters()] == [old.id, new.id]

    play(scene())
