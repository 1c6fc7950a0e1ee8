"""What the log says when readiness changes. Pure."""

import re
from collections.abc import Iterable

_SECONDS = re.compile(r"\d[\d.,]* s\b")  # seconds grow while the trouble stays the same
_CALM = 3  # looks without a trouble: a trouble that comes and goes is one outage


class ReadinessNews:
    """Each cause is reported once in an outage, which lasts until there was no trouble for a while."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        self._calm = 0

    def of(self, troubles: Iterable[str]) -> list[str]:
        """The troubles to report now."""
        found = {_cause(trouble): trouble for trouble in troubles}
        self._calm = 0 if found else self._calm + 1
        news = []
        for cause in sorted(found, key=len, reverse=True):  # a short one may be a part of a longer one
            if not any(cause in reported for reported in self._reported):
                news.append(found[cause])
                self._reported.add(cause)
        return news

    def is_over(self) -> bool:
        """Whether an outage has ended; once for each."""
        is_over = bool(self._reported) and self._calm >= _CALM
        if is_over:
            self._reported.clear()
        return is_over


def _cause(trouble: str) -> str:
    return _SECONDS.sub("", trouble.partition(" is stuck")[0])
