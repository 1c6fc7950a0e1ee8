"""Requests to the cluster. Each has a time limit, and an error that says what to do. Calls block."""

import contextlib
import time
from concurrent.futures import wait
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from onward import clock
from onward.brokers.kafka.client import REQUEST_S, ClientFactory, explained
from onward.errors import BrokerError

_POLL_S = 0.05
_FIRST_S = 3.0  # for a cluster that has never answered
_LIST_S = 1.0
_REFRESH_S = 0.5  # between refreshes of the metadata: the request may have gone to a dead node


class Admin:
    """`client` is librdkafka's admin client, for requests whose futures the caller awaits itself."""

    def __init__(self, factory: ClientFactory) -> None:
        self.client = factory.admin()
        self._factory = factory
        self._has_answered = False

    def answer(self, future: Any, doing: str) -> Any:
        """Wait for the future and return its result. BrokerError: no answer. KafkaException: the cluster refused."""
        since = refreshed = clock.now()
        while wait([future], _POLL_S).not_done:
            self._check(since, doing)
            if clock.now() > refreshed + _REFRESH_S:
                self._refresh()
                refreshed = clock.now()
        result = future.result()
        self._has_answered, self._factory.down = True, ""
        return result

    def metadata(self, doing: str) -> Any:
        """All topics with their partitions, and the nodes."""
        since = clock.now()
        while True:
            try:
                return self.client.list_topics(timeout=_LIST_S)
            except KafkaException as error:
                time.sleep(_POLL_S)
                self._check(since, doing)
                if error.args[0].code() not in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT):
                    raise explained(error, doing) from error

    def _refresh(self) -> None:
        """Ask any node for metadata. The client sends requests to the node that it takes for the controller. With KRaft
        that may be any node, and the client waits for it even if it is dead."""
        with contextlib.suppress(KafkaException):
            self.client.list_topics(timeout=_LIST_S)

    def _check(self, since: float, doing: str) -> None:
        """BrokerError: waiting longer is useless.

        A cluster that has never answered is the wrong one or does not run; one that has answered may come back."""
        self.client.poll(0)  # calls the error callback
        waited_s = clock.now() - since
        where = f"Kafka at {self._factory.servers}"
        if self._factory.denied:
            raise BrokerError(f"{where}: {doing}: {self._factory.denied}; check the user, password and TLS settings")
        if self._factory.down and waited_s > (REQUEST_S if self._has_answered else _FIRST_S):
            raise BrokerError(
                f"{where} cannot be reached: {self._factory.down} ({doing}); is it running, and are host and port "
                "right?"
            )
        if waited_s > REQUEST_S:
            raise BrokerError(f"{where}: {doing}: no answer in {REQUEST_S:g} s; is it a healthy Kafka server?")
