"""The monitor: counts the dead letters at intervals, and calls the alert hooks."""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from onward.error_report import message_of, name_of
from onward.failure.trace import in_brief
from onward.failure.watch import Alert, AlertState, Tally, Thresholds

log = logging.getLogger("onward")

Hook = Callable[[Alert], Any]
"""Called with an alert. An `async def` runs on the event loop, everything else in a thread."""

_FIRST_S = 30.0  # the first check is earlier, for processes that live shorter than the interval
_HOOK_TIMEOUT_S = 30.0
_MOST_PENDING = 100  # alerts stored for a hook that fails; beyond, the oldest are dropped


class Monitor:
    """`read` counts the dead letters. A hook that fails gets the same alert again at the next check."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Sequence[Tally]]],
        hooks: Sequence[Hook],
        *,
        thresholds: Thresholds,
        every_s: float,
    ) -> None:
        self.counted: Sequence[Tally] = ()  # at the last check
        self._read = read
        self._state = AlertState(thresholds)
        self._hooks = [AlertHook(hook) for hook in hooks]
        self._every_s = every_s

    async def run(self) -> None:
        """Until cancelled."""
        wait_s = min(_FIRST_S, self._every_s)
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._every_s
            await self.check()

    async def check(self) -> None:
        try:
            self.counted = await self._read()
            alerts = self._state.see(self.counted)
        except Exception as error:  # every kind: the operator must learn that the monitor does not work
            log.error("the dead letters cannot be counted\n%s", in_brief(error))
            alerts = self._state.fail(message_of(error) or name_of(error))
        await self._ring(alerts)

    async def _ring(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            log.log(logging.ERROR if alert.kind in ("high", "broken") else logging.INFO, "alert: %s", alert.text)
        news = [alert for hook in self._hooks for alert in await hook.send(alerts)]
        for hook in self._hooks:  # the hooks that work report those that do not
            if others := [alert for alert in news if alert.subject != hook.name]:
                await hook.send(others)


class AlertHook:
    """One hook, and the alerts that it has not accepted yet."""

    def __init__(self, hook: Hook) -> None:
        self.name = getattr(hook, "__name__", None) or str(hook)
        self._hook = hook
        self._pending: deque[Alert] = deque(maxlen=_MOST_PENDING)
        self._broken = False

    async def send(self, alerts: Sequence[Alert]) -> list[Alert]:
        """Call the hook with the pending alerts, then with these. Returns alerts about the hook itself: it failed, or
        it works again."""
        self._pending.extend(alerts)
        if not self._pending:
            return []
        try:
            while self._pending:
                async with asyncio.timeout(_HOOK_TIMEOUT_S):
                    await _call(self._hook, self._pending[0])
                self._pending.popleft()
        except Exception as error:  # a hook may raise anything; the other hooks are still called
            text = "the alert hook %s failed; it is tried again with the next check\n%s"
            log.error(text, self.name, in_brief(error))
            if not self._broken:
                self._broken = True
                why = message_of(error) or name_of(error)
                return [Alert("broken", self.name, f"the alert hook {self.name} failed: {why}")]
            return []
        if self._broken:
            self._broken = False
            return [Alert("repaired", self.name, f"the alert hook {self.name} works again")]
        return []


async def _call(hook: Hook, alert: Alert) -> None:
    if inspect.iscoroutinefunction(hook):
        await hook(alert)
        return
    answer = await asyncio.to_thread(hook, alert)
    if inspect.isawaitable(answer):
        await answer
