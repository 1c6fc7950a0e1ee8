from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from onward import settings
from onward.errors import BadName, BadSetting


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ONWARD_URL", "ONWARD_APP", "ONWARD_CLIENT", "ONWARD_PARTITIONS"):
        monkeypatch.delenv(name, raising=False)


def test_a_keyword_beats_the_url_beats_the_environment_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onward.toml").write_text('url = "sqlite:///file.db"\npartitions = 2\n')
    assert settings.load().partitions == 2
    assert settings.load().url == "sqlite:///file.db"
    monkeypatch.setenv("ONWARD_PARTITIONS", "3")
    assert settings.load().partitions == 3
    assert settings.load("sqlite:///x.db?partitions=4").partitions == 4
    assert settings.load("sqlite:///x.db?partitions=4").url == "sqlite:///x.db"
    assert settings.load("sqlite:///x.db?partitions=4", partitions=5).partitions == 5


@pytest.mark.parametrize(
    ("url", "keywords", "says"),
    [
        ("sqlite:///x?partition=1", {}, "did you mean 'partitions'"),
        ("sqlite:///x", {"partitions": 0}, "partitions=0 from a keyword: .*; use a number, such as partitions=8"),
        ("sqlite:///x?lease_s=soon", {}, "lease_s='soon' from the URL: .*; use seconds, such as lease_s=10.0"),
        ("sqlite:///x?lease_s=inf", {}, "lease_s='inf' from the URL: .*; use seconds"),
        ("sqlite:///x", {"lease_s": float("nan")}, "lease_s=nan from a keyword: .*; use seconds"),
        ("sqlite:///x?retention_s=1e300", {}, "retention_s='1e300' from the URL: .*; use seconds"),
        ("sqlite:///x?max_event_bytes=1k", {}, "from the URL: .*; use bytes, such as max_event_bytes=1048576"),
        ("sqlite:///x?auto_declare=maybe", {}, "from the URL: .*; use true or false"),
        ("sqlite:///x", {"durability": "maybe"}, "durability='maybe' from a keyword: .*; use fsync or window"),
        ("sqlite:///a#b.db?partitions=4", {}, "the URL contains a #.*; write it as %23"),
        ("kafka://host:9092#x", {}, "the URL contains a #"),
        (7, {}, "the URL must be text, not int; write it in quotes"),
        ("sqlite:///x?lease_s=1e-9", {}, "lease_s='1e-9' from the URL: .* >= 0.1.*; use seconds, such as lease_s=10.0"),
        ("kafka://host", {"lease_s": 0.09}, "lease_s=0.09 from a keyword: .* >= 0.1"),
    ],
)
def test_a_bad_setting_is_named_with_its_source_and_cure(url: Any, keywords: dict[str, object], says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        settings.load(url, **keywords)


def test_a_value_is_named_with_its_source_in_the_environment_and_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onward.toml").write_text("lease_s = inf\n")
    with pytest.raises(BadSetting, match=r"lease_s=inf from onward\.toml"):
        settings.load()
    (tmp_path / "onward.toml").unlink()
    monkeypatch.setenv("ONWARD_PARTITIONS", "many")
    with pytest.raises(BadSetting, match="partitions='many' from the environment"):
        settings.load()


def test_client_settings_are_merged_from_every_source(tmp_path: Path) -> None:
    """In TOML a name with dots may be written with or without quotes."""
    (tmp_path / "onward.toml").write_text('[client]\n"linger.ms" = 5\nssl.ca.location = "a.pem"\nretries = 1\n')
    loaded = settings.load(
        "kafka://host?client.linger.ms=7&client.acks=all&client.a=%23", client={"acks": 1, "on_error": print}
    )
    assert dict(loaded.client) == {
        "linger.ms": "7",
        "ssl.ca.location": "a.pem",
        "retries": 1,
        "acks": 1,
        "a": "#",
        "on_error": print,
    }


@pytest.mark.parametrize(
    ("url", "keywords", "says"),
    [
        ("kafka://host?linger.ms=7", {}, r"the URL sets 'linger.ms', .* is written client.linger.ms=..."),
        ("kafka://host", {"linger.ms": 7}, r"a keyword sets 'linger.ms', .* client={'linger.ms': ...}"),
        ("kafka://host?client=7", {}, r"client from the URL has no names; write client.NAME=..."),
        ("kafka://host?client.=7", {}, r"client from the URL has no names; write client.NAME=..."),
        ("kafka://host", {"client": "linger.ms"}, r"client from a keyword .* write client={'NAME': ...}"),
        ("kafka://host", {"client": {1: 2}}, r"client from a keyword .* write client={'NAME': ...}"),
    ],
)
def test_a_client_setting_written_wrongly_is_named_with_its_cure(
    url: str, keywords: dict[str, object], says: str
) -> None:
    with pytest.raises(BadSetting, match=says):
        settings.load(url, **keywords)


def test_a_wrong_client_setting_in_the_file_or_the_environment_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onward.toml").write_text('"linger.ms" = 5\n')
    with pytest.raises(BadSetting, match=r"onward.toml sets 'linger.ms', .* under the heading \[client\]"):
        settings.load()
    (tmp_path / "onward.toml").unlink()
    monkeypatch.setenv("ONWARD_CLIENT", "linger.ms=5")
    with pytest.raises(BadSetting, match=r"client from the environment .* client.NAME=... in the query of ONWARD_URL"):
        settings.load()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ONWARD_PATITIONS", "ONWARD_PARTITIONS"),
        ("ONWARD_DRAIN_TIMEOUT", "ONWARD_DRAIN_TIMEOUT_S"),
        ("ONWARD_APPS", "ONWARD_APP"),
        ("ONWARD_URI", "ONWARD_URL"),
        ("ONWARD_METRIC", "ONWARD_METRICS"),
    ],
)
def test_a_misspelt_name_in_the_environment_is_an_error_that_names_the_right_one(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(BadSetting, match=f"the environment sets {name}, .* did you mean {meant}\\?"):
        settings.load()


def test_other_unknown_names_in_the_environment_cause_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kubernetes sets such names for a service named onward, and for one named onward-metrics."""
    monkeypatch.setattr(settings, "_warned", set())
    names = ["ONWARD_METRICS_PORT", "ONWARD_PORT", "ONWARD_PORT_80_TCP_ADDR", "ONWARD_SERVICE_HOST"]
    for name in names:
        monkeypatch.setenv(name, "tcp://10.0.0.1:80")
    for _ in range(2):
        settings.load()
    (line,) = caplog.messages
    assert ", ".join(names) in line
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setattr("onward.context.in_worker", True)
    settings.load()
    assert len(caplog.messages) == 1, "a worker of the process engine repeated the warning"


def test_names_of_the_command_line_and_of_the_tests_are_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ONWARD_METRICS", "ONWARD_CHILD", "ONWARD_STORM_S", "ONWARD_APP"):
        monkeypatch.setenv(name, "1")
    settings.load()
    assert not caplog.messages


@pytest.mark.parametrize("heading", ["[onward]", "[tool.onward]"])
def test_settings_under_a_heading_are_an_error_with_the_cure(tmp_path: Path, heading: str) -> None:
    (tmp_path / "onward.toml").write_text(f"{heading}\npartitions = 4\n")
    with pytest.raises(BadSetting, match=r"write settings at the top, without a heading; remove the line \[.*onward\]"):
        settings.load()


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "onward.toml").write_text("partitions = = 2")
    with pytest.raises(BadSetting, match=r"onward\.toml"):
        settings.load()


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "käse", ".", "..", "x" * 201, "a\n"])
def test_a_name_that_a_broker_refuses_is_refused(name: str) -> None:
    with pytest.raises(BadName):
        settings.check_name("topic", name)


def test_a_password_is_never_shown() -> None:
    assert settings.redacted("amqp://user:secret@host:5672/v") == "amqp://***@host:5672/v"
    assert settings.redacted("kafka://host:9092") == "kafka://host:9092"
    assert settings.redacted("sqlite:///home/me@work/a.db") == "sqlite:///home/me@work/a.db"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("kafka:u:SECRET@h", "***@h"),
        ("kafka:/u:SECRET@h", "***@h"),
        ("kafka:///u:SECRET@h", "kafka://***@h"),
        ("//u:SECRET@h", "***@h"),
        ("u:SECRET@h", "***@h"),
        ("SECRET:u@h", "***@h"),
        ("postgres:u:SECRET@h/db", "***@h/db"),
        ("kafka\n://u:SECRET@h", "***@h"),
        (" kafka://u:SECRET@h", "***@h"),
        ("KAFKA://u:SECRET@h", "KAFKA://***@h"),
        ("kafka://u:SECRET@h,u2:SECRET@h2", "kafka://***@h2"),
        ("sqlite://u:SECRET@h/x", "sqlite://***@h/x"),
        ("sqlite:///u:SECRET@h/x", "sqlite://***@h/x"),
        ("sqlite:///a@b.db", "sqlite:///a@b.db"),
        ("sqlite:////home/a@b.db", "sqlite:////home/a@b.db"),
        ("redis://h:6379/0?password=SECRET", "redis://h:6379/0?***"),
    ],
)
def test_a_password_in_a_url_that_is_written_wrongly_is_not_shown(url: str, shown: str) -> None:
    assert settings.redacted(url) == shown


def test_a_url_that_is_not_text_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "onward.toml").write_text('url = ["kafka://u:SECRET@h"]\n')
    for url in (None, "sqlite:///a.db"):
        with pytest.raises(BadSetting, match="the URL must be text, not list") as caught:
            settings.load(url)
        assert "SECRET" not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"


@pytest.mark.parametrize(
    ("url", "keywords", "says"),
    [
        ("sqlite:///x.db?durability=\udc80", {}, "the URL contains half a surrogate pair"),
        ("kafka://u:SECRET\udc80@h", {}, "the URL contains half a surrogate pair"),
        ("sqlite:///x.db", {"durability": "\ud800"}, r"durability='.ud800' from a keyword contains half"),
        ("sqlite:///x.db", {"app": "\udfff"}, r"app='.udfff' from a keyword contains half a surrogate pair"),
        ("kafka://h", {"client": {"a": "SECRET\udc80"}}, "client 'a' from a keyword contains half a surrogate pair"),
        ("kafka://h", {"client": {"\udc80": "a"}}, "client '.udc80' from a keyword contains half a surrogate pair"),
    ],
)
def test_text_that_cannot_be_encoded_is_refused(url: str, keywords: dict[str, object], says: str) -> None:
    with pytest.raises(BadSetting, match=says) as caught:
        settings.load(url, **keywords)
    assert "SECRET" not in str(caught.value)


def test_a_variable_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_APP", "shop\udcff:app")
    with pytest.raises(BadSetting, match=r"app=.* from the environment contains half a surrogate pair"):
        settings.load()
    monkeypatch.setenv("ONWARD_URL", "sqlite:///\udcff.db")
    with pytest.raises(BadSetting, match="the URL contains half a surrogate pair"):
        settings.load()


@pytest.mark.parametrize(
    "password", ["p/ssword", "p@ssword", "p?ssword", "p#ssword", "p:ssword", "p sword", "p[ssword"]
)
def test_no_part_of_a_password_is_shown(password: str) -> None:
    assert settings.redacted(f"kafka://ann:{password}@host:9092/v") == "kafka://***@host:9092/v"


@pytest.mark.parametrize("password", ["p/s3cret", "p?s3cret", "p#s3cret", "p[s3cret", "p\N{ACCOUNT OF}s3cret"])
def test_a_password_that_is_not_encoded_is_an_error_that_does_not_show_it(password: str) -> None:
    with pytest.raises(BadSetting, match=r"urllib\.parse\.quote") as caught:
        settings.load(f"kafka://bob:{password}@host:9092?partitions=4")
    shown = f"{caught.value} {caught.value.__context__}"
    assert not any(part in shown for part in ("bob", "s3cret", "host"))
    loaded = settings.load(f"kafka://bob:{quote(password, safe='')}@host:9092?partitions=4")
    assert loaded.partitions == 4


def test_without_any_source_the_broker_is_a_file_in_the_current_folder() -> None:
    assert settings.load().url == "sqlite:///onward.db"


def test_settings_print_what_was_given_without_secrets() -> None:
    loaded = settings.load("kafka://ann:secret@host:9092", partitions=4, client={"sasl.password": "secret"})
    assert repr(loaded) == "Settings(url='kafka://***@host:9092', client={'sasl.password': ***}, partitions=4)"
