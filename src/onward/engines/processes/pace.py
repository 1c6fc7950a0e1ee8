"""How much a worker should have at hand, and how soon to look at it again. Pure."""

AHEAD_S = 0.01  # so much work a worker has at hand: enough to hide the way to and fro
AHEAD_MOST_S = 0.05  # and so much on a machine so busy that it wakes us late
AHEAD = 512  # and at most so many events
GLANCE_S = 0.004  # how often the pages of busy workers are read
REST_S = 0.05  # and how often while nothing changes


class Pace:
    """Learns from what runs took, and from how late the timer rang."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._late_s = 0.0
        self._pause_s = REST_S

    @property
    def window(self) -> int:
        """How many events a worker should have, the running one included. One, until a run has been seen."""
        if self._mean_s is None:
            return 1
        ahead_s = min(AHEAD_S + 2 * self._late_s, AHEAD_MOST_S)
        return min(AHEAD, 1 + int(ahead_s / max(self._mean_s, 1e-6)))

    @property
    def resting(self) -> bool:
        """For some time nothing has changed."""
        return self._pause_s >= REST_S

    def next_look_s(self, most: int) -> float:
        """In how many seconds to look, when the one who has most has so many: a worker without more calls itself."""
        return self._pause_s if most > 1 else REST_S

    def looked(self, late_s: float) -> None:
        self._late_s = max(late_s, 0.95 * self._late_s)
        self._pause_s = min(self._pause_s * 2, REST_S)

    def ran(self, count: int, took_s: float) -> None:
        """So many runs ended, and took so long together."""
        sample_s = took_s / count
        self._mean_s = sample_s if self._mean_s is None else 0.7 * self._mean_s + 0.3 * sample_s
        self._pause_s = GLANCE_S
