from pathlib import Path
from urllib.parse import quote

import pytest

from onward import settings
from onward.errors import BadName, BadSetting


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ONWARD_URL", "ONWARD_APP", "ONWARD_PARTITIONS"):
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
        ("sqlite:///x", {"partitions": 0}, "partitions=0 from a keyword"),
        ("sqlite:///x?lease_s=soon", {}, "lease_s='soon' from the URL"),
        ("sqlite:///x", {"durability": "maybe"}, "durability='maybe'"),
    ],
)
def test_a_bad_setting_is_named_with_its_source(url: str, keywords: dict[str, object], says: str) -> None:
    with pytest.raises(BadSetting, match=says.replace("(", r"\(")):
        settings.load(url, **keywords)


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


def test_without_any_source_there_is_a_file_in_this_folder() -> None:
    assert settings.load().url == "sqlite:///onward.db"


def test_settings_print_what_was_set_without_secrets() -> None:
    loaded = settings.load("kafka://ann:secret@host:9092", partitions=4, **{"sasl.password": "secret"})
    assert repr(loaded) == "Settings(url='kafka://***@host:9092', client={'sasl.password': ***}, partitions=4)"
