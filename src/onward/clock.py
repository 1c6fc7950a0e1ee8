"""The clock for leases and deadlines: time since boot. It counts suspended time, and setting the wall clock does not
change it.

Unix time is only stored and shown. It may be wrong: other publishers may have set it to anything.
"""

import functools
import sys
import time
from datetime import datetime, tzinfo
from pathlib import Path

_CALENDAR_S = (-62_135_596_800.0, 253_402_300_800.0)  # the years 1 to 9999, in Unix time


def in_calendar(seconds: float) -> bool:
    """Whether this Unix time has a date. NaN, the infinities and the year 10000 have none."""
    return _CALENDAR_S[0] <= seconds < _CALENDAR_S[1]


def moment(seconds: float, zone: tzinfo | None = None) -> datetime | None:
    """The date and time of a Unix time, in this zone or in the local one. None: it has no date."""
    try:
        return datetime.fromtimestamp(seconds, zone)
    except (ValueError, OverflowError, OSError):
        return None


if sys.platform == "linux":

    def now() -> float:
        """Seconds since boot, the same in every process of this machine."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    @functools.cache  # a process lives in one boot
    def boot_id() -> str:
        """The id of this boot. Values of `now` from different boots cannot be compared."""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
else:

    def now() -> float:
        """Seconds since boot, the same in every process of this machine."""
        return time.monotonic()

    def boot_id() -> str:
        """Empty: there is no boot id here. Instead, a lease that ends later than its own length from now counts as one
        of another boot."""
        return ""
