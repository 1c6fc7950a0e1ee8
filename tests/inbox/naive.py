"""A common way to write idempotence: SET NX before the handler, DEL on an exception. It loses events."""

from redis.asyncio import Redis

from tests.inbox.redis_calls import Handler


async def handle(redis: Redis, event_id: str, handler: Handler) -> bool:
    """Returns False if it takes the event for a duplicate, which is then acknowledged."""
    key = f"event:processed:{event_id}"
    if not await redis.set(key, "1", nx=True, ex=7 * 86_400):
        return False
    try:
        await handler()
    except Exception:
        await redis.delete(key)
        raise
    return True
