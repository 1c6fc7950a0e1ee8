"""A session that carries an outbox through one request of a web application."""

import logging
from typing import Any, TypeAlias, Unpack

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from onward.event import Event
from onward.outbox.outbox import AddOptions, Outbox
from onward.outbox.session import count_waiting

log = logging.getLogger("onward")

Sessions: TypeAlias = sessionmaker[Any]
AsyncSessions: TypeAlias = async_sessionmaker[Any]


class OutboxSession:
    """A session and an outbox. Nothing is committed until you call `commit`."""

    def __init__(self, outbox: Outbox, session: Session) -> None:
        self.session = session
        self._outbox = outbox

    def add(self, topic: str, value: Any, **options: Unpack[AddOptions]) -> Event:
        """`Outbox.add` with this session."""
        return self._outbox.add(self.session, topic, value, **options)

    def commit(self) -> None:
        self.session.commit()

    def rollback(self) -> None:
        self.session.rollback()


class AsyncOutboxSession:
    """An async session and an outbox. Nothing is committed until you call `commit`."""

    def __init__(self, outbox: Outbox, session: AsyncSession) -> None:
        self.session = session
        self._outbox = outbox

    def add(self, topic: str, value: Any, **options: Unpack[AddOptions]) -> Event:
        """`Outbox.add` with this session."""
        return self._outbox.add(self.session, topic, value, **options)

    async def commit(self) -> None:
        await self.session.commit()

    async def rollback(self) -> None:
        await self.session.rollback()


def is_async(sessions: Sessions | AsyncSessions) -> bool:
    return isinstance(sessions, async_sessionmaker)


def warn_of_lost_events(session: Session | AsyncSession) -> None:
    """The request has ended without an error. Say so if it added events and did not commit them."""
    if count := count_waiting(session):
        log.warning(
            "a request added %d events to the outbox and ended without a commit, so they are dropped; commit before "
            "the response is returned",
            count,
        )
