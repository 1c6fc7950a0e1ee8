"""The clock of leases and deadlines: time since boot, which neither a wall-clock step nor a sleep disturbs."""

import functools
import sys
import time
from pathlib import Path

if sys.platform == "linux":

    def now() -> float:
        """Seconds since boot, the same in every process of this machine."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    @functools.cache  # a process lives in one boot
    def boot_id() -> str:
        """Names this boot; a `now` of another boot cannot be compared."""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
else:

    def now() -> float:
        """Seconds since boot, the same in every process of this machine."""
        return time.monotonic()

    def boot_id() -> str:
        """No boot id here: a lease that ends later than its own length from now is taken as another boot's."""
        return ""
