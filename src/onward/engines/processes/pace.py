"""Decides how much work a worker should have at hand, and how soon to check it again. Pure.

The window adapts, because a fixed one is slow: with a window of 1, handlers of 50 µs run 2.7 times slower (measured).
"""

AHEAD_S = 0.01  # how much work a worker has at hand: enough to hide the latency of the socket
AHEAD_MOST_S = 0.05  # the same, on a machine so busy that the engine's timer is late
AHEAD = 512  # the most events that a worker has at hand
GLANCE_S = 0.004  # how often the engine reads the pages of busy workers
REST_S = 0.05  # how often it does so while nothing changes


class Pace:
    """Adapts to how long runs take, and to how late the timer fires."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._late_s = 0.0
        self._pause_s = REST_S

    @property
    def window(self) -> int:
        """How many events a worker should have, including the running one. It is 1 until some run has ended."""
        if self._mean_s is None:
            return 1
        ahead_s = min(AHEAD_S + 2 * self._late_s, AHEAD_MOST_S)
        return min(AHEAD, 1 + int(ahead_s / max(self._mean_s, 1e-6)))

    @property
    def resting(self) -> bool:
        """Whether nothing has changed for some time."""
        return self._pause_s >= REST_S

    def next_look_s(self, most: int) -> float:
        """The seconds until the next check, if the busiest worker has `most` works. A worker with one work reports its
        end by itself."""
        return self._pause_s if most > 1 else REST_S

    def looked(self, late_s: float) -> None:
        self._late_s = max(late_s, 0.95 * self._late_s)
        self._pause_s = min(self._pause_s * 2, REST_S)

    def ran(self, mean_s: float) -> None:
        """Some runs of a worker have ended. `mean_s`: their mean duration."""
        self._mean_s = mean_s if self._mean_s is None else 0.7 * self._mean_s + 0.3 * mean_s
        self._pause_s = GLANCE_S
