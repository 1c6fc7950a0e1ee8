"""The broker suite: one scenario for each promise of onward.brokers.base, the same for all brokers.

A subclass provides the fixture `harness`, a BrokerUnderTest. A scenario is skipped only if the broker's `features` say
that the broker lacks what it tests.
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
    """Every promise of a broker. A broker with shared partitions provides a SharedUnderTest as its harness."""


@pytest.mark.slow
class BrokerSuiteUnderLoad(PublishScenarios, DeliveryScenarios, OwnershipScenarios, GroupScenarios):
    """The same scenarios, except those of succession and shared partitions, under load: other processes publish to the
    broker and consume from it meanwhile."""

    @pytest.fixture(autouse=True)
    def load(self, harness: BrokerUnderTest) -> Iterator[None]:
        tasks: list[dict[str, Any]] = [
            {"mode": "flood", "batch": 20, "pause_s": 0.01},
            {"mode": "work", "effects": "/dev/null"},
        ]
        common: dict[str, Any] = {"url": harness.url, "settings": {}, "topic": "load", "group": "load"}
        processes = [Process(["-m", "onward.testing.member", json.dumps(common | task)]) for task in tasks]
        yield
        for process in processes:
            process.end()
