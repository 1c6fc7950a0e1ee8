"""What librdkafka says, as it comes to the log of the application."""

import logging

import pytest

from onward import settings
from onward.brokers.kafka.client import Client
from onward.brokers.kafka.reports import Reports, told_of

REFUSED = (
    "[thrd:127.0.0.1:19/bootstrap]: 127.0.0.1:19/bootstrap: "
    "Connect to ipv4#127.0.0.1:19 failed: Connection refused (after 0ms in state CONNECT)"
)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "onward.kafka")
    return caplog


def said(lines: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in lines.records if record.levelno >= level]


@pytest.mark.parametrize(
    ("line", "server", "cause"),
    [
        (REFUSED, "127.0.0.1:19", "Connection refused"),
        (
            "GroupCoordinator: one.example:9092: Disconnected (after 3ms in state UP)",
            "one.example:9092",
            "Disconnected",
        ),
        (
            "sasl_ssl://b-1:9093/2: SASL authentication error: no (after 1ms)",
            "b-1:9093",
            "SASL authentication error: no",
        ),
        (
            "[thrd:GroupCoordinator]: GroupCoordinator: Connect to ipv4#127.0.0.1:19 failed: Refused (after 0ms)",
            "127.0.0.1:19",
            "Refused",
        ),
        ("[thrd:main]: 3/3 brokers are down", "the cluster", "[thrd:main]: 3/3 brokers are down"),
    ],
)
def test_a_line_is_told_of_its_server(line: str, server: str, cause: str) -> None:
    assert told_of(line) == (server, cause)


def test_a_trouble_that_lasts_is_told_once_a_minute(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr("onward.clock.now", lambda: now)
    voice = Reports([])
    for _ in range(100):
        voice.log(logging.ERROR, "", "FAIL", "client-1", REFUSED)
        voice.log(logging.ERROR, "", "FAIL", "client-2", REFUSED)
    assert said(lines) == ["Kafka at 127.0.0.1:19: Connection refused; trying again"]
    voice.log(logging.ERROR, "", "FAIL", "client-1", REFUSED.replace("refused", "reset"))
    assert len(said(lines)) == 2
    now += 61
    voice.log(logging.ERROR, "", "FAIL", "client-1", REFUSED)
    assert len(said(lines)) == 3


def test_other_lines_keep_their_level_and_small_talk_is_for_those_who_debug(lines: pytest.LogCaptureFixture) -> None:
    voice = Reports([])
    voice.log(logging.WARNING, "", "SESSTMOUT", "client-1", "the session timed out")
    voice.log(logging.WARNING, "", "BGQUEUE", "client-1", "Purging 3 unserved events from background queue")
    voice.log(
        logging.CRITICAL, "", "FATAL", "client-1", "Fatal error: Local: Gap-less ordering would not be guaranteed"
    )
    voice.log(logging.CRITICAL, "", "FATAL", "client-1", "Fatal error: Broker: Static member fenced")
    assert said(lines) == [
        "client-1: SESSTMOUT: the session timed out",
        "client-1: FATAL: Fatal error: Broker: Static member fenced",
    ]
    assert len(said(lines, logging.DEBUG)) == 4


def test_no_secret_comes_to_the_log_or_into_an_error(lines: pytest.LogCaptureFixture) -> None:
    url = "kafka://ann:pa%40ss@one:9093?client.sasl.oauthbearer.client.secret=hidden-1"
    loaded = settings.load(url, client={"ssl.key.password": "hidden-2", "security.protocol": "SASL_SSL"})
    voice = Client(loaded.url, loaded)._reports
    voice.log(logging.WARNING, "", "SASL", "client-1", "tried pa@ss, hidden-1 and hidden-2 of ann")
    assert said(lines) == ["client-1: SASL: tried ***, *** and *** of ann"]
