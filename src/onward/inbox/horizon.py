"""How long after its effect an event may come again. The inbox must remember it for longer."""

import re
from hashlib import sha256

from onward.errors import BadSetting
from onward.failure.retry import Retry
from onward.settings import Settings

_PLAIN = re.compile(r"[!-~]{1,128}")


def longest_redelivery_s(settings: Settings, retry: Retry, timeout_s: float | None) -> float:
    """The longest time from an effect to a redelivery: the retention, every attempt at its longest, and a takeover.

    A run of a handler without a time limit counts as `max_poll_gap_s`.
    """
    waits_s = sum(
        min(retry.first_delay_s * retry.factor ** min(attempt, 64), retry.max_delay_s) * (1 + retry.jitter)
        for attempt in range(retry.attempts - 1)
    )
    runs_s = retry.attempts * (settings.max_poll_gap_s if timeout_s is None else timeout_s)
    takeover_s = settings.lease_s + settings.takeover_grace_s + settings.revoke_grace_s
    return settings.retention_s + waits_s + runs_s + takeover_s


def horizon_s(name: str, given_s: float | None, longest_s: float) -> float:
    """The horizon to use: the given one if it is long enough, by default twice the longest redelivery."""
    if given_s is None:
        return 2 * longest_s
    if given_s <= longest_s:
        raise BadSetting(
            f"{name}: horizon_s={given_s:g} is too short: an event may come again {longest_s:,.0f} s after its effect "
            "(retention_s, the retries and a takeover), and the effect would happen twice. Raise horizon_s, lower "
            "retention_s, or leave horizon_s out"
        )
    return given_s


def stored_id(event_id: str) -> str:
    """The event's id in a form that every store accepts: short printable ASCII unchanged, anything else as a digest."""
    if _PLAIN.fullmatch(event_id):
        return event_id
    return f"sha256-{sha256(event_id.encode('utf-8', 'surrogatepass')).hexdigest()}"
