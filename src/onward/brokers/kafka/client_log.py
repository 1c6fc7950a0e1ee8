"""Writes librdkafka's log lines to the application's log. A repeated connection error is a warning once a minute."""

import logging
import re
import threading
from collections.abc import Iterable

from onward import clock

log = logging.getLogger("onward.kafka")

_REPEAT_S = 60.0  # how often an error that lasts is logged as a warning
_MOST_ERRORS = 1_000
_CONNECTION = frozenset({"FAIL", "ERROR"})
# Lines about settings that we chose on purpose, and about states that we wait for.
_EXPECTED = frozenset({"CONFWARN", "BGQUEUE", "GETPID", "TERMINATE", "METADATAUPDATE"})
_GAPLESS = "Gap-less ordering"  # an event was refused: publish reports it, and makes a new producer
_LINE = re.compile(
    r"(?:\[thrd:[^\]]*\]: )?(?:\w+: )?"
    r"(?:(?:\w+://)?(?P<server>[^/\s]+:\d+)(?:/\w+)?|Connect to \w+#(?P<tried>\S+) failed): "
    r"(?P<cause>.*?)(?: \(after .*)?",
    re.DOTALL,
)
_ATTEMPT = re.compile(r"^Connect to \S+ failed: ")


class ClientLog:
    """The logger of librdkafka's clients. Safe to call from any thread.

    `secrets`: texts that it replaces with `***` in every line."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted({each for each in secrets if each}, key=len, reverse=True)
        self._logged_at: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def log(self, level: int, _: str, facility: str, client: str, line: str) -> None:
        """Called by librdkafka."""
        text = self.scrubbed(line)
        if facility in _CONNECTION:
            self._connection_error(*server_and_cause(text))
        elif facility in _EXPECTED or (facility == "FATAL" and _GAPLESS in text):
            log.debug("%s: %s: %s", client, facility, text)
        else:
            log.log(level, "%s: %s: %s", client, facility, text)

    def scrubbed(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _connection_error(self, server: str, cause: str) -> None:
        now = clock.now()
        with self._lock:
            is_new = now - self._logged_at.get((server, cause), -_REPEAT_S) >= _REPEAT_S
            if is_new:
                if len(self._logged_at) >= _MOST_ERRORS:
                    self._logged_at.clear()
                self._logged_at[server, cause] = now
        log.log(logging.WARNING if is_new else logging.DEBUG, "Kafka at %s: %s; trying again", server, cause)


def server_and_cause(text: str) -> tuple[str, str]:
    """The server that one of librdkafka's lines or errors is about, and what is wrong with it."""
    found = _LINE.fullmatch(text)
    if found is None:
        return "the cluster", text
    return found["server"] or found["tried"], _ATTEMPT.sub("", found["cause"])
