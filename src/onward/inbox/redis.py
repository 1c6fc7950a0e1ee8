"""RedisInbox: for effects outside a database. An event is free, claimed by one run for a lease, or done."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

import msgspec
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

from onward.brokers.base import Progress
from onward.engines.base import Call, Work
from onward.errors import BadHandler, BadSetting, BrokerError, Busy, InDoubt, Superseded, Unreachable
from onward.event import Delivery
from onward.inbox.base import Asked, Ground, Run
from onward.inbox.horizon import horizon_s as safe_horizon_s
from onward.inbox.horizon import stored_id
from onward.inbox.scripts import CLAIM, DONE, FAIL, RENEW
from onward.settings import redacted

log = logging.getLogger("onward")

_MIN_LEASE_S = 1.0
_WAIT_S = 5.0  # how long a run waits for another run of the same event before it gives up
_LOOK_S = 0.1


class Claim(msgspec.Struct, frozen=True):
    """A handler may have a parameter of this type. `fence` grows with every run, for APIs that compare versions."""

    key: str
    fence: int
    token: str


class Scripts:
    """The scripts, registered at a sync or async client."""

    def __init__(self, client: Any) -> None:
        self.claim, self.renew = client.register_script(CLAIM), client.register_script(RENEW)
        self.done, self.fail = client.register_script(DONE), client.register_script(FAIL)


class RedisInbox:
    """An inbox in Redis: `@app.handler(..., inbox=RedisInbox("redis://..."))`, for `def` and `async def`.

    A run claims its event for `lease_s`, renews the claim while the handler runs, and then marks the event as done for
    `horizon_s`. The default is twice the longest time after which an event may come again. A run that fails or is
    cancelled gives its claim back. The claim of a killed process ends with its lease. The effect and the mark are two
    steps: after a kill between them the effect happens twice. `app.idempotency_key` lets the other system notice that.
    """

    def __init__(
        self, url: str, *, prefix: str = "onward:inbox", lease_s: float = 30.0, horizon_s: float | None = None
    ) -> None:
        if lease_s < _MIN_LEASE_S:
            raise BadSetting(
                f"RedisInbox(lease_s={lease_s:g}): give at least {_MIN_LEASE_S:g} s; it is renewed after each third"
            )
        self._url = url
        self._prefix = prefix
        self._lease_s = lease_s
        self._given_s = horizon_s
        self._horizon_s = 0.0
        self._client: AsyncRedis | None = None  # of the event loop that runs the application
        self._sync_client: Redis | None = None

    # -- the contract ---------------------------------------------------------------------------------------------

    def gives(self, annotation: Any) -> bool:
        return annotation is Claim

    def around(self, run: Run, asked: Asked) -> Call:
        if asked.engine == "processes":
            raise BadHandler(f"{asked.name}: an inbox cannot reach into worker processes; use 'threads' or 'tasks'")
        if asked.batch:
            raise BadHandler(f"{asked.name}: RedisInbox handles single events (batch_size=1); for batches use SqlInbox")
        return _Async(self, run, asked) if asked.is_async else _Sync(self, run, asked)

    async def start(self, ground: Ground) -> None:
        longest_s = safe_horizon_s(ground.name, self._given_s, ground.longest_redelivery_s)
        if self._client is None:
            self._client = AsyncRedis.from_url(self._url, decode_responses=True)
            self._sync_client = Redis.from_url(self._url, decode_responses=True)
            self.scripts, self.sync_scripts = Scripts(self._client), Scripts(self._sync_client)
        try:
            memory = await self._client.info("memory")
        except RedisError as error:
            await self.close()
            raise BrokerError(
                f"{redacted(self._url)}: the inbox cannot be reached: {error}; is the server running?"
            ) from error
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory") and policy != "noeviction":
            await self.close()
            raise BadSetting(
                f"{redacted(self._url)}: maxmemory-policy {policy} may evict the marks of an inbox, and effects would "
                "happen twice; set it to noeviction, or use another server for the inbox"
            )
        self._horizon_s = max(self._horizon_s, longest_s)

    def settled(self, group: str, progress: Sequence[Progress]) -> None:
        """Nothing to do: marks expire by their age."""

    async def upkeep(self) -> None:
        await asyncio.Event().wait()  # Redis expires keys by itself

    async def close(self) -> None:
        client, sync_client, self._client, self._sync_client = self._client, self._sync_client, None, None
        if client is not None:
            await client.aclose()
        if sync_client is not None:
            sync_client.close()

    # -- for the calls below --------------------------------------------------------------------------------------

    @property
    def lease_s(self) -> float:
        return self._lease_s

    @property
    def lease_ms(self) -> int:
        return int(self._lease_s * 1000)

    @property
    def horizon_ms(self) -> int:
        assert self._horizon_s, "start derives the horizon before the first event"
        return int(self._horizon_s * 1000)

    def keys(self, group: str, delivery: Delivery) -> tuple[str, str]:
        event = delivery.event
        name = f"{self._prefix}:{{{group}:{event.topic}:{stored_id(event.id)}}}"
        return name, f"{name}:fence"


class _Lease:
    """How long a claim is certainly ours. Counted from before the call that made or renewed it."""

    def __init__(self, lease_s: float, asked_at: float) -> None:
        self._lease_s = lease_s
        self.until = asked_at + lease_s

    def renewed(self, asked_at: float) -> None:
        self.until = asked_at + self._lease_s

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until


class _Sync:
    def __init__(self, inbox: RedisInbox, run: Run, asked: Asked) -> None:
        self._inbox, self._run, self._asked = inbox, run, asked

    @property
    def _scripts(self) -> Scripts:
        return self._inbox.sync_scripts

    def __call__(self, work: Work) -> None:
        assert isinstance(work, Delivery)
        keys = self._inbox.keys(self._asked.group, work)
        claim, lease = self._claimed(keys)
        if claim is None:
            return
        ended = threading.Event()
        renewing = threading.Thread(target=self._keep, args=(claim, lease, ended), daemon=True, name="onward-inbox")
        renewing.start()
        try:
            self._run(work, claim)
        except BaseException:
            self._give_back(claim)
            raise
        finally:
            ended.set()
            renewing.join()
        with _storing_the_mark():
            done = self._scripts.done(keys=keys[:1], args=[claim.token, self._inbox.horizon_ms])
        if not done:
            raise _lost(claim)

    def _claimed(self, keys: tuple[str, str]) -> tuple[Claim | None, _Lease]:
        inbox, name, give_up = self._inbox, uuid4().hex, time.monotonic() + _WAIT_S
        while True:
            asked_at = time.monotonic()
            with _claiming():
                verdict, number = self._scripts.claim(keys=keys, args=[name, inbox.lease_ms, inbox.horizon_ms])
            if verdict != "BUSY":
                claim = Claim(keys[0], number, f"{number}:{name}") if verdict == "RUN" else None
                return claim, _Lease(inbox.lease_s, asked_at)
            _still_patient(give_up, keys[0], number)
            time.sleep(min(_LOOK_S, max(number, 1) / 1000))

    def _keep(self, claim: Claim, lease: _Lease, ended: threading.Event) -> None:
        inbox = self._inbox
        while not ended.wait(inbox.lease_s / 3):
            asked_at = time.monotonic()
            try:
                if not self._scripts.renew(keys=[claim.key], args=[claim.token, inbox.lease_ms]):
                    log.error("%s: the claim was lost while the handler ran; another run may overlap", claim.key)
                    return
            except RedisError as error:
                log.warning("%s: the claim cannot be renewed now: %s", claim.key, error)
            else:
                lease.renewed(asked_at)

    def _give_back(self, claim: Claim) -> None:
        with contextlib.suppress(RedisError):  # then the claim ends with its lease
            self._scripts.fail(keys=[claim.key], args=[claim.token])


class _Async:
    def __init__(self, inbox: RedisInbox, run: Run, asked: Asked) -> None:
        self._inbox, self._run, self._asked = inbox, run, asked

    @property
    def _scripts(self) -> Scripts:
        return self._inbox.scripts

    async def __call__(self, work: Work) -> None:
        assert isinstance(work, Delivery)
        keys = self._inbox.keys(self._asked.group, work)
        claim, lease = await self._claimed(keys)
        if claim is None:
            return
        try:
            await self._under_lease(work, claim, lease)
        except BaseException:
            # In its own task: a cancelled run can be cancelled again while it cleans up.
            await asyncio.shield(asyncio.ensure_future(self._give_back(claim)))
            raise
        # The effect has happened. A cancellation now does not undo it, so the mark is stored in any case.
        done = asyncio.ensure_future(self._scripts.done(keys=keys[:1], args=[claim.token, self._inbox.horizon_ms]))
        with _storing_the_mark():
            ours = await asyncio.shield(done)
        if not ours:
            raise _lost(claim)

    async def _claimed(self, keys: tuple[str, str]) -> tuple[Claim | None, _Lease]:
        inbox, name, give_up = self._inbox, uuid4().hex, time.monotonic() + _WAIT_S
        while True:
            asked_at = time.monotonic()
            with _claiming():
                verdict, number = await self._scripts.claim(keys=keys, args=[name, inbox.lease_ms, inbox.horizon_ms])
            if verdict != "BUSY":
                claim = Claim(keys[0], number, f"{number}:{name}") if verdict == "RUN" else None
                return claim, _Lease(inbox.lease_s, asked_at)
            _still_patient(give_up, keys[0], number)
            await asyncio.sleep(min(_LOOK_S, max(number, 1) / 1000))

    async def _under_lease(self, work: Work, claim: Claim, lease: _Lease) -> None:
        """Run the handler while the claim is ours. Raise Superseded if it is lost."""
        me = asyncio.current_task()
        assert me is not None
        lost = False

        def cut() -> None:
            nonlocal lost
            lost = True
            me.cancel()

        renewing = asyncio.create_task(self._keep(claim, lease, cut))
        try:
            await self._run(work, claim)
        except asyncio.CancelledError:
            if lost and me.uncancel() == 0:
                raise _lost(claim) from None
            raise
        finally:
            renewing.cancel()

    async def _keep(self, claim: Claim, lease: _Lease, cut: Any) -> None:
        inbox = self._inbox
        while not lease.over:
            await asyncio.sleep(min(inbox.lease_s / 3, max(lease.until - time.monotonic(), 0)))
            asked_at = time.monotonic()
            try:
                if not await self._scripts.renew(keys=[claim.key], args=[claim.token, inbox.lease_ms]):
                    break
            except RedisError as error:
                log.warning("%s: the claim cannot be renewed now: %s", claim.key, error)
            else:
                lease.renewed(asked_at)
        log.error("%s: the claim was lost while the handler ran, so the run is cancelled", claim.key)
        cut()

    async def _give_back(self, claim: Claim) -> None:
        with contextlib.suppress(RedisError):  # then the claim ends with its lease
            await self._scripts.fail(keys=[claim.key], args=[claim.token])


@contextlib.contextmanager
def _claiming() -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        raise Unreachable(f"the inbox's Redis cannot be used ({error}); is it running?") from error


@contextlib.contextmanager
def _storing_the_mark() -> Iterator[None]:
    """The effect has happened. If the answer is lost, the next run sees whether the mark was stored."""
    try:
        yield
    except RedisError as error:
        raise InDoubt(f"the inbox's Redis did not answer whether it has stored the mark ({error})") from error


def _still_patient(give_up: float, key: str, left_ms: int) -> None:
    if time.monotonic() >= give_up:
        raise Busy(f"{key}: another run has claimed it, for up to {left_ms / 1000:.1f} s more")


def _lost(claim: Claim) -> Superseded:
    return Superseded(f"{claim.key}: this run lost its claim, and the event belongs to another run")
