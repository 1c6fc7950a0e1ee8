"""Checks that the newest token of a queue is the real one. The owners note in the aside how far they were.

A policy of the server or an operator may have deleted the token. Then the group goes on from the owner's last note:
some events run again, and none is lost.
"""

import contextlib
import logging
import time
from typing import NamedTuple

import msgspec

from onward import clock
from onward.brokers.rabbitmq.amqp import Connection
from onward.brokers.rabbitmq.aside.aside_entries import AsidePlace
from onward.brokers.rabbitmq.aside.aside_log import AsideLost, AsideStream
from onward.brokers.rabbitmq.ordered.tenancy_parts import TenancyParts
from onward.brokers.rabbitmq.ordered.token import Token, decoded, newer
from onward.brokers.rabbitmq.ordered.token_channel import TokenChannel
from onward.errors import BrokerError
from onward.event import Partition

log = logging.getLogger("onward")

_LEASES = 2  # how long the token may be with a consumer that is about to return it


class TokenMissing(BrokerError):
    """The queue does not have the real token. Look again later."""


class FoundToken(NamedTuple):
    token: Token
    aside: AsideStream  # claimed with the next fence


class TokenSearch:
    """For one partition. It remembers since when the real token is missing."""

    def __init__(self, partition: Partition, parts: TenancyParts) -> None:
        self._partition = partition
        self._parts = parts
        self._missing_since: float | None = None

    async def real(self, connection: Connection, desk: TokenChannel, newest: Token | None) -> FoundToken:
        """The token to go on from, with the aside claimed. Raises TokenMissing, or what the aside raises."""
        aside = await self._claimed(connection, desk, newest)
        if aside is not None:
            assert newest is not None, "only the fence of a token can be claimed"
            self._missing_since = None
            return FoundToken(self._of_this_topic(newest), aside)
        aside = self._parts.asides.owned(connection, AsidePlace(*self._place))
        try:
            with contextlib.suppress(AsideLost):
                await desk.unless_lost(aside.claim(0))
            token = self._restored(aside, newest)
        finally:
            await aside.close()
        aside = await self._claimed(connection, desk, token, force=True)
        assert aside is not None, "the fence is above all that were seen"
        self._missing_since = None
        return FoundToken(self._of_this_topic(token), aside)

    @property
    def _place(self) -> tuple[str, str, int]:
        return self._partition.topic, self._parts.group, self._partition.index

    async def _claimed(
        self, connection: Connection, desk: TokenChannel, token: Token | None, *, force: bool = False
    ) -> AsideStream | None:
        """The aside, claimed for the owner after this token. None: an owner has noted a higher fence, so this is not
        the real token."""
        if token is None:
            return None
        aside = self._parts.asides.owned(connection, AsidePlace(*self._place))
        try:
            await desk.unless_lost(aside.claim(token.fence + 1))
            witnessed = aside.witnessed
            if force or witnessed is None or witnessed[0] <= token.fence:
                return aside
        except AsideLost:
            pass
        except BaseException:
            await aside.close()
            raise
        await aside.close()
        return None

    def _restored(self, aside: AsideStream, newest: Token | None) -> Token:
        """The token to write in place of the missing one, after it was missing for a while."""
        now = clock.now()
        if aside.witnessed is None and aside.fence_seen == 0 and newest is None:
            return self._parts.first_token(self._partition)  # no owner was ever there
        if self._missing_since is None:
            self._missing_since = now
        wait_s = _LEASES * self._parts.settings.lease_s
        if now < self._missing_since + wait_s:
            raise TokenMissing(  # the same text each time, so that it is logged once
                "its token is not in its queue; it was deleted, or a consumer has it. If it is missing for "
                f"{wait_s:g} s, the group goes on from the progress that the last owner noted"
            )
        token = _witness(aside) or newest or self._parts.first_token(self._partition)
        if newest is not None:
            token = newer(newest, token)
        fence = max(token.fence, aside.fence_seen, int(time.time()) if aside.witnessed is None else 0)
        log.error(
            "RabbitMQ: %s of group %s: its token is gone. The group goes on from offset %d; events that were handled "
            "after that run again. Check that no policy limits or expires the messages of its queue",
            *(self._partition, self._parts.group, token.watermark),
        )
        return msgspec.structs.replace(token, fence=fence, number=0)

    def _of_this_topic(self, token: Token) -> Token:
        """If the topic was deleted and created again, the progress does not count."""
        topic_id = self._parts.topic_ids[self._partition.topic]
        if token.topic_id == topic_id:
            return token
        log.warning("RabbitMQ: %s is a new log; group %s reads it from its beginning", *self._place[:2])
        return msgspec.structs.replace(
            token, topic_id=topic_id, log_id=topic_id, watermark=0, progress="", anchors=(), is_seed=True
        )


def _witness(aside: AsideStream) -> Token | None:
    """With the fence of its entry, which was checked."""
    if aside.witnessed is None:
        return None
    fence, body = aside.witnessed
    token = decoded(body)
    return msgspec.structs.replace(token, fence=fence) if isinstance(token, Token) else None
