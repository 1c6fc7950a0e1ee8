"""Which application or broker a command uses, and its errors if there is none."""

import sys
from pathlib import Path

import pytest

from onward.app import Onward
from onward.cli.find import choose, load, system
from onward.cli.say import Misuse
from onward.errors import BadSetting

APP = 'from onward import Onward\napp = Onward("sqlite:///shop.db")\n'


def refusal(target: str) -> str:
    with pytest.raises(Misuse) as caught:
        load(target)
    return str(caught.value)


class TestLoad:
    def test_finds_a_module_of_the_current_folder(self, here: Path) -> None:
        (here / "shop.py").write_text(APP)
        assert load("shop:app").settings.url == "sqlite:///shop.db"
        assert sys.path[0] == str(here)

    def test_finds_a_submodule_and_an_attribute_of_an_attribute(self, here: Path) -> None:
        (here / "store").mkdir()
        (here / "store" / "shop.py").write_text(APP + "class Container:\n    inner = app\n")
        assert isinstance(load("store.shop:Container.inner"), Onward)

    def test_calls_a_factory(self, here: Path) -> None:
        (here / "shop.py").write_text(APP + "def make() -> Onward:\n    return app\n")
        assert load("shop:make") is load("shop:app")

    @pytest.mark.parametrize("target", ["shop", "shop:", ":app", "", ".shop:app", "shop:.app"])
    def test_refuses_what_is_not_module_and_app(self, here: Path, target: str) -> None:
        assert "not MODULE:APP" in refusal(target)

    @pytest.mark.parametrize("target", ["store/shop.py:app", "./store/shop:app", "store/shop.py"])
    def test_names_the_module_of_a_file(self, here: Path, target: str) -> None:
        assert "store.shop:app" in refusal(target)

    def test_suggests_a_module_with_a_similar_name(self, here: Path) -> None:
        (here / "shop.py").write_text(APP)
        assert "did you mean 'shop'?" in refusal("shpo:app")

    def test_names_the_missing_part_of_a_dotted_module(self, here: Path) -> None:
        assert "no module 'store'" in refusal("store.shop:app")

    def test_shows_the_traceback_of_a_broken_module_only(self, here: Path) -> None:
        (here / "shop.py").write_text("import lower\n")
        (here / "lower.py").write_text("def fail():\n    return {}['price']\nfail()\n")
        text = refusal("shop:app")
        assert "KeyError: 'price'" in text
        assert "shop.py" in text
        assert "lower.py" in text
        assert "importlib" not in text
        assert "find.py" not in text

    def test_a_missing_import_within_the_module_is_an_error_of_the_module(self, here: Path) -> None:
        (here / "shop.py").write_text("import no_such_library\n")
        text = refusal("shop:app")
        assert "cannot import 'shop'" in text
        assert "import no_such_library" in text

    def test_shows_where_the_syntax_is_wrong(self, here: Path) -> None:
        (here / "shop.py").write_text("def (\n")
        assert "SyntaxError" in refusal("shop:app")

    def test_an_error_of_onward_within_the_module_names_the_line(self, here: Path) -> None:
        (here / "shop.py").write_text('from onward import Onward\napp = Onward("sqlite:///shop.db?lease=3")\n')
        with pytest.raises(BadSetting, match="lease") as caught:
            load("shop:app")
        assert "shop.py, line 2" in caught.value.__notes__[0]

    def test_suggests_a_similar_name_and_lists_the_applications_of_a_module(self, here: Path) -> None:
        (here / "shop.py").write_text(APP + "billing = app\n")
        text = refusal("shop:ap")
        assert "did you mean 'app'?" in text
        assert "shop:app, shop:billing" in text

    @pytest.mark.parametrize(
        ("name", "kind"),
        [("number", "a int"), ("Onward", "the class onward.app.Onward"), ("later", "a function"), ("wrong", "a dict")],
    )
    def test_refuses_what_is_not_an_application(self, here: Path, name: str, kind: str) -> None:
        (here / "shop.py").write_text(
            APP + "number = 1\nasync def later(): return app\ndef wrong(): return {}\ndef needy(url): return app\n"
        )
        assert f"{kind}, not an Onward; it has shop:app" in refusal(f"shop:{name}")
        assert "needs arguments" in refusal("shop:needy")

    def test_shows_the_traceback_of_a_factory(self, here: Path) -> None:
        (here / "shop.py").write_text("def make():\n    return 1 / 0\n")
        text = refusal("shop:make")
        assert "shop:make() failed" in text
        assert "ZeroDivisionError" in text
        assert "find.py" not in text

    @pytest.mark.parametrize("target", ["kafka://u:SECRET@h/", "kafka:u:SECRET@h", "u:SECRET@h.py", "sqlite:///a.db"])
    def test_refuses_a_url_without_showing_its_password(self, here: Path, target: str) -> None:
        with pytest.raises(Misuse, match="give a URL in ONWARD_URL") as caught:
            load(target)
        assert "SECRET" not in str(caught.value)


class TestChoose:
    def test_refuses_two_options(self, here: Path) -> None:
        with pytest.raises(Misuse, match="give one"):
            choose("shop:app", "sqlite:///a.db", {})

    def test_an_option_wins_over_the_environment(self, here: Path) -> None:
        environment = {"ONWARD_APP": "other:app", "ONWARD_URL": "sqlite:///other.db"}
        assert choose("shop:app", None, environment)[:2] == ("shop:app", None)
        assert choose(None, "sqlite:///a.db", environment)[:2] == (None, "sqlite:///a.db")

    def test_the_environment_wins_over_the_file(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (here / "onward.toml").write_text('app = "file:app"\n')
        assert choose(None, None, {}).app == "file:app"
        monkeypatch.setenv("ONWARD_URL", "sqlite:///env.db")
        assert choose(None, None, {"ONWARD_URL": "sqlite:///env.db"}).how == "ONWARD_URL"
        monkeypatch.setenv("ONWARD_APP", "env:app")
        assert choose(None, None, {"ONWARD_APP": "env:app"}).app == "env:app"

    def test_prints_what_it_uses_without_the_password(self, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
        system(None, "redis://user:secret@host")
        captured = capsys.readouterr()
        assert captured.err == "using redis://***@host (the given URL)\n"
        assert captured.out == ""

    def test_uses_the_url_of_the_file(self, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (here / "onward.toml").write_text('url = "sqlite:///file.db"\n')
        assert system(None, None).settings.url == "sqlite:///file.db"
        assert "onward.toml" in capsys.readouterr().err

    def test_has_a_default(self, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert system(None, None).settings.url == "sqlite:///onward.db"
        assert "the default" in capsys.readouterr().err


class TestIgnoredUrl:
    """The application names its URL in the code, so ONWARD_URL has no effect."""

    @pytest.mark.parametrize("given", ["sqlite:///other.db", "sqlite:///other.db#"])
    def test_a_command_warns_of_an_ignored_url(
        self, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
    ) -> None:
        (here / "shop.py").write_text(APP)
        monkeypatch.setenv("ONWARD_URL", given)
        system("shop:app", None)
        using, warning = capsys.readouterr().err.splitlines()
        assert using == "using sqlite:///shop.db (--app shop:app)"
        assert warning.startswith("warning: ONWARD_URL is ignored: the application names its URL in the code")

    @pytest.mark.parametrize("code", ["Onward()", "Onward('sqlite:///env.db')"])
    def test_no_warning_if_the_application_uses_it(
        self, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str
    ) -> None:
        (here / "shop.py").write_text(f"from onward import Onward\napp = {code}\n")
        monkeypatch.setenv("ONWARD_URL", "sqlite:///env.db?lease_s=3")
        system("shop:app", None)
        assert capsys.readouterr().err == "using sqlite:///env.db (--app shop:app)\n"

    def test_no_warning_if_the_command_line_gives_a_url(
        self, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("ONWARD_URL", "sqlite:///env.db")
        system(None, "sqlite:///shop.db")
        assert capsys.readouterr().err == "using sqlite:///shop.db (the given URL)\n"
