"""The broker suite: every sentence of onward.brokers.base as a scenario, the same for all brokers.

A subclass provides the fixture `harness`. What a broker cannot do is known from its `features` alone.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from onward.testing.delivery import DeliveryScenarios
from onward.testing.groups import GroupScenarios
from onward.testing.ownership import OwnershipScenarios
from onward.testing.publishing import PublishScenarios
from onward.testing.scenario import BrokerUnderTest, Process
from onward.testing.shared import SharedScenarios
from onward.testing.succession import SuccessionScenarios


class BrokerSuite(
    PublishScenarios, DeliveryScenarios, OwnershipScenarios, SuccessionScenarios, GroupScenarios, SharedScenarios
):
    pass


@pytest.mark.slow
class BrokerSuiteUnderLoad(PublishScenarios, DeliveryScenarios, OwnershipScenarios, GroupScenarios):
    """All of it but the shared partitions again, while other processes publish to and consume from the same broker."""

    @pytest.fixture(autouse=True)
    def load(self, harness: BrokerUnderTest) -> Iterator[None]:
        tasks: list[dict[str, Any]] = [
            {"mode": "flood", "batch": 20, "pause_s": 0.01},
            {"mode": "work", "effects": "/dev/null"},
        ]
        common: dict[str, Any] = {"url": harness.url, "settings": {}, "topic": "load", "group": "load"}
        others = [Process(["-m", "onward.testing.member", json.dumps(common | task)]) for task in tasks]
        yield
        for process in others:
            process.end()
