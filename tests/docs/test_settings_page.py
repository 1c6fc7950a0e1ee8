"""docs/settings.md describes every setting as settings.py declares it."""

import re

import pytest

from onward.brokers import SCHEMES
from tests.docs import settings_page
from tests.docs.settings_page import (
    GROUPS,
    PAGE,
    brokers,
    default,
    description,
    descriptions,
    names,
    rendered,
    values,
)


def test_the_tables_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page) == page, "docs/settings.md is out of date; run `make docs`"


def test_every_setting_is_in_one_table_of_the_page() -> None:
    marks = re.findall(r"<!-- settings: (\w+) -->", PAGE.read_text(encoding="utf-8"))
    assert sorted(name for mark in marks for name in GROUPS[mark]) == sorted(names())


def test_every_setting_has_a_description() -> None:
    assert all(description(name) for name in names())
    assert sorted(descriptions()) == sorted(names())


def test_a_setting_without_a_description_is_named() -> None:
    with pytest.raises(AssertionError, match="the setting turbo has no description: write a string under its field"):
        description("turbo")


def test_the_page_names_the_brokers_that_accept_a_setting() -> None:
    for label, name in [(scheme.label, name) for scheme in SCHEMES.values() for name in scheme.takes]:
        assert label in brokers(name) or brokers(name) == "all"
    assert (brokers("client"), brokers("file_mode"), brokers("lease_s")) == (
        "Kafka, Redis, RabbitMQ",
        "SQLite",
        "all",
    )


def test_defaults_and_values_are_written_for_people() -> None:
    assert (default("max_event_bytes"), default("retention_s"), default("max_gap")) == ("1 MiB", "7 days", "1,000,000")
    assert (default("auto_declare"), default("lease_s"), default("settle_interval_s")) == ("`true`", "10 s", "0.05 s")
    assert (values("partitions"), values("lease_s"), values("dead_check_s")) == (
        "1 to 4096",
        "0.1 or more",
        "more than 0",
    )
    assert (values("file_mode"), values("auto_declare")) == ("`private`, `umask`", "`true`, `false`")
    assert settings_page.size(1000) == "1,000 bytes"
