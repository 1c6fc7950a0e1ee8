"""What a URL's scheme decides: which broker is opened, which settings it takes, what can be asked before it is open."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onward import brokers, settings
from onward.app import Onward
from onward.brokers import SCHEMES
from onward.errors import BadSetting, MissingExtra, UnknownScheme
from onward.settings import Settings
from tests.examples import ROOT

ELSEWHERE = """
async def open_broker(url, settings): return (url, settings.lease_s)

def open_at_once(url, settings): return (url, settings.retention_bytes)

def absent(settings): return "no server"
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("ONWARD_"):
            monkeypatch.delenv(name)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package that has two schemes and claims a third without having it."""
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    points = {"later": "elsewhere:open_broker", "once": "elsewhere:open_at_once", "broken": "no_such_module:open"}
    folder = tmp_path / "elsewhere-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[onward.brokers]", *lines, ""]))
    monkeypatch.syspath_prepend(str(tmp_path))


def opened(url: str, **keywords: Any) -> Any:
    return asyncio.run(brokers.open_broker(settings.load(url, **keywords)))


@pytest.mark.usefixtures("package")
class TestAnotherPackage:
    def test_may_open_its_broker_asynchronously_or_at_once(self) -> None:
        assert opened("later://host/x", lease_s=3) == ("later://host/x", 3.0)
        assert opened("later://host/x") == ("later://host/x", 10.0)
        assert opened("once://host/x?retention_bytes=5&durability=window&client.a=b") == ("once://host/x", 5)

    def test_may_say_that_there_is_nothing_to_open(self) -> None:
        assert brokers.absent(settings.load("later://host")) == "no server"
        assert brokers.holder(settings.load("later://host")) is None
        assert brokers.label(settings.load("later://host")) == "later"

    def test_that_cannot_be_imported_is_named(self) -> None:
        for ask in (brokers.absent, brokers.holder, lambda given: opened(given.url)):
            with pytest.raises(MissingExtra, match="no_such_module"):
                ask(settings.load("broken://host"))
            with pytest.raises(UnknownScheme, match="later://"):
                ask(settings.load("unknown://host"))


class TestSettings:
    @pytest.mark.parametrize(
        ("url", "keywords", "says"),
        [
            ("kafka://host?retention_bytes=7", {}, "retention_bytes=7 from the URL: Kafka does not take it"),
            ("kafka://host", {"durability": "fsync"}, "durability='fsync' from a keyword: Kafka .* for SQLite"),
            ("kafka://host", {"max_backlog_bytes": 9}, "max_backlog_bytes=9 from a keyword: Kafka does not take it"),
            ("sqlite:///a.db", {"replication": 3}, "replication=3 from a keyword: SQLite does not take it"),
            ("sqlite:///a.db?client.x=1", {}, "client={'x': [*]{3}} from the URL: SQLite .* for Kafka"),
        ],
    )
    def test_one_that_the_broker_does_not_take_is_refused(self, url: str, keywords: dict[str, Any], says: str) -> None:
        with pytest.raises(BadSetting, match=says):
            Onward(url, **keywords)
        with pytest.raises(BadSetting, match=says):
            opened(url, **keywords)

    def test_so_is_one_from_the_environment_or_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "onward.toml").write_text("retention_bytes = 7\n")
        Onward("sqlite:///a.db")
        with pytest.raises(BadSetting, match=r"retention_bytes=7 from onward\.toml: Kafka"):
            Onward("kafka://host")
        monkeypatch.setenv("ONWARD_RETENTION_BYTES", "8")
        with pytest.raises(BadSetting, match="retention_bytes=8 from the environment: Kafka"):
            Onward("kafka://host")

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_every_one_that_a_scheme_takes_is_a_setting(self, scheme: str) -> None:
        assert SCHEMES[scheme].takes <= {field.name for field in msgspec.structs.fields(Settings)}

    def test_a_lease_is_the_schemes_own_unless_it_is_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        slow = msgspec.structs.replace(SCHEMES["sqlite"], lease_s=25.0)
        monkeypatch.setattr(brokers, "SCHEMES", {**SCHEMES, "sqlite": slow})
        assert Onward("sqlite:///a.db").settings.lease_s == 25.0
        assert Onward("sqlite:///a.db?lease_s=10").settings.lease_s == 10.0
        assert Onward("kafka://host").settings.lease_s == SCHEMES["kafka"].lease_s

    def test_what_is_completed_or_made_by_hand_stays_as_it_is(self) -> None:
        made = Settings(url="kafka://host", retention_bytes=7, lease_s=2.0)
        assert brokers.completed(made) is made
        done = brokers.completed(settings.load("sqlite:///a.db", lease_s=2.0))
        assert brokers.completed(done) is done


class TestWhatIsThere:
    def test_a_file_is_absent_until_it_is_opened(self, tmp_path: Path) -> None:
        there = settings.load(brokers.embedded(tmp_path / "a #1?.db"))
        assert brokers.absent(there) == f"{tmp_path / 'a #1?.db'} does not exist"

        async def main() -> None:
            await (await brokers.open_broker(there)).close()

        asyncio.run(main())
        assert brokers.absent(there) == ""
        assert (tmp_path / "a #1?.db").exists()
        assert brokers.holder(there) is None

    def test_a_server_is_never_absent(self) -> None:
        assert brokers.absent(settings.load("kafka://host")) == ""
        assert brokers.holder(settings.load("kafka://host")) is None

    def test_brokers_have_names_for_people(self) -> None:
        assert brokers.label(settings.load("sqlite:///a.db")) == "SQLite"
        assert brokers.label(settings.load("kafka://host")) == "Kafka"


def test_the_docs_say_which_settings_each_broker_takes() -> None:
    text = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- settings -->\n(.*?)<!-- /settings -->", text, re.DOTALL)
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    schemes = {scheme.label: scheme for scheme in SCHEMES.values()}  # two may lead to one broker
    assert head[2:] == list(schemes)
    written = {row[0].strip("`"): row[2:] for row in rows}
    names = sorted(set().union(*[scheme.takes for scheme in SCHEMES.values()]))
    assert written == {name: ["yes" if name in scheme.takes else "no" for scheme in schemes.values()] for name in names}
