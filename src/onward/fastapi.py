"""FastAPI: a session that carries an outbox, as a dependency."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, overload

from onward.outbox import Outbox
from onward.outbox.request_session import (
    AsyncOutboxSession,
    AsyncSessions,
    OutboxSession,
    Sessions,
    is_async,
    warn_of_lost_events,
)

__all__ = ["AsyncOutboxSession", "OutboxSession", "outbox_session"]


@overload
def outbox_session(outbox: Outbox, sessions: AsyncSessions) -> Callable[[], AsyncIterator[AsyncOutboxSession]]: ...
@overload
def outbox_session(outbox: Outbox, sessions: Sessions) -> Callable[[], Iterator[OutboxSession]]: ...
def outbox_session(outbox: Outbox, sessions: Any) -> Callable[[], Any]:
    """A dependency: `Depends(outbox_session(outbox, sessions))`. Each request gets a new session with the outbox.

    `sessions` is a sessionmaker or an async_sessionmaker of SQLAlchemy. Commit in your function, before it returns:
    FastAPI ends dependencies after it has sent the response, when the client can no longer learn of a failed commit.
    What you did not commit is rolled back.
    """

    def plain() -> Iterator[OutboxSession]:
        with sessions() as session:
            yield OutboxSession(outbox, session)
            warn_of_lost_events(session)

    async def asynchronous() -> AsyncIterator[AsyncOutboxSession]:
        async with sessions() as session:
            yield AsyncOutboxSession(outbox, session)
            warn_of_lost_events(session)

    return asynchronous if is_async(sessions) else plain
