"""librdkafka's log lines, as they appear in the application's log."""

import logging

import pytest

from onward import settings
from onward.brokers.kafka.client import ClientFactory
from onward.brokers.kafka.client_log import ClientLog, server_and_cause

REFUSED = (
    "[thrd:127.0.0.1:19/bootstrap]: 127.0.0.1:19/bootstrap: "
    "Connect to ipv4#127.0.0.1:19 failed: Connection refused (after 0ms in state CONNECT)"
)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "onward.kafka")
    return caplog


def logged(lines: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
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
def test_a_line_names_its_server_and_the_cause(line: str, server: str, cause: str) -> None:
    assert server_and_cause(line) == (server, cause)


def test_an_error_that_lasts_is_logged_once_a_minute(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr("onward.clock.now", lambda: now)
    client_log = ClientLog([])
    for _ in range(100):
        client_log.log(logging.ERROR, "", "FAIL", "client-1", REFUSED)
        client_log.log(logging.ERROR, "", "FAIL", "client-2", REFUSED)
    assert logged(lines) == ["Kafka at 127.0.0.1:19: Connection refused; trying again"]
    client_log.log(logging.ERROR, "", "FAIL", "client-1", REFUSED.replace("refused", "reset"))
    assert len(logged(lines)) == 2
    now += 61
    client_log.log(logging.ERROR, "", "FAIL", "client-1", REFUSED)
    assert len(logged(lines)) == 3


def test_other_lines_keep_their_level_and_expected_ones_are_logged_at_debug(lines: pytest.LogCaptureFixture) -> None:
    client_log = ClientLog([])
    client_log.log(logging.WARNING, "", "SESSTMOUT", "client-1", "the session timed out")
    client_log.log(logging.WARNING, "", "BGQUEUE", "client-1", "Purging 3 unserved events from background queue")
    client_log.log(
        logging.CRITICAL, "", "FATAL", "client-1", "Fatal error: Local: Gap-less ordering would not be guaranteed"
    )
    client_log.log(logging.CRITICAL, "", "FATAL", "client-1", "Fatal error: Broker: Static member fenced")
    assert logged(lines) == [
        "client-1: SESSTMOUT: the session timed out",
        "client-1: FATAL: Fatal error: Broker: Static member fenced",
    ]
    assert len(logged(lines, logging.DEBUG)) == 4


def test_no_secret_is_in_the_log(lines: pytest.LogCaptureFixture) -> None:
    url = "kafka://ann:pa%40ss@one:9093?client.sasl.oauthbearer.client.secret=hidden-1"
    loaded = settings.load(url, client={"ssl.key.password": "hidden-2", "security.protocol": "SASL_SSL"})
    client_log = ClientFactory(loaded.url, loaded)._log
    client_log.log(logging.WARNING, "", "SASL", "client-1", "tried pa@ss, hidden-1 and hidden-2 of ann")
    assert logged(lines) == ["client-1: SASL: tried ***, *** and *** of ann"]
