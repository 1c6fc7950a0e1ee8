"""What librdkafka says, in the log of the application: one line where it says the same a hundred times."""

import logging
import re
import threading
from collections.abc import Iterable

from onward import clock

log = logging.getLogger("onward.kafka")

_AGAIN_S = 60.0  # how often a trouble that lasts is told
_MOST_TROUBLES = 1_000
_CONNECTION = frozenset({"FAIL", "ERROR"})
# What we set on purpose, or know how to wait for.
_TALK = frozenset({"CONFWARN", "BGQUEUE", "GETPID", "TERMINATE", "METADATAUPDATE"})
_GAPLESS = "Gap-less ordering"  # an event was refused: the publisher says so, and has a new producer
_LINE = re.compile(
    r"(?:\[thrd:[^\]]*\]: )?(?:\w+: )?"
    r"(?:(?:\w+://)?(?P<server>[^/\s]+:\d+)(?:/\w+)?|Connect to \w+#(?P<tried>\S+) failed): "
    r"(?P<cause>.*?)(?: \(after .*)?",
    re.DOTALL,
)
_ATTEMPT = re.compile(r"^Connect to \S+ failed: ")


class Reports:
    """The logger of clients, as they call it. Safe to call from any thread.

    `secrets`: texts that must not be in a line."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted({each for each in secrets if each}, key=len, reverse=True)
        self._told: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def log(self, level: int, _: str, facility: str, client: str, line: str) -> None:
        text = self.scrubbed(line)
        if facility in _CONNECTION:
            self._trouble(*told_of(text))
        elif facility in _TALK or (facility == "FATAL" and _GAPLESS in text):
            log.debug("%s: %s: %s", client, facility, text)
        else:
            log.log(level, "%s: %s: %s", client, facility, text)

    def scrubbed(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _trouble(self, server: str, cause: str) -> None:
        now = clock.now()
        with self._lock:
            is_news = now - self._told.get((server, cause), -_AGAIN_S) >= _AGAIN_S
            if is_news:
                if len(self._told) >= _MOST_TROUBLES:
                    self._told.clear()
                self._told[server, cause] = now
        log.log(logging.WARNING if is_news else logging.DEBUG, "Kafka at %s: %s; trying again", server, cause)


def told_of(text: str) -> tuple[str, str]:
    """The server and what is wrong with it, of one of librdkafka's lines or errors."""
    found = _LINE.fullmatch(text)
    if found is None:
        return "the cluster", text
    return found["server"] or found["tried"], _ATTEMPT.sub("", found["cause"])
