"""The documentation names only what exists, and names everything that is public."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from onward import errors
from onward.brokers import SCHEMES
from tests.docs.honest import api_page, commands, fixed_values, links, metrics, names, settings
from tests.docs.known import exported_metrics, extras, unlisted
from tests.docs.pages import Pages, pages

PAGES = pages()
CHECKS: list[Callable[[Pages], list[str]]] = [
    commands.wrong_commands,
    commands.missing_commands,
    commands.wrong_targets,
    settings.wrong_settings,
    settings.wrong_values,
    settings.wrong_defaults,
    names.wrong_names,
    names.wrong_classes,
    names.wrong_keywords,
    names.wrong_files,
    fixed_values.wrong_lists,
    fixed_values.wrong_exit_codes,
    fixed_values.wrong_paths,
    api_page.private_imports,
    api_page.wrong_tables,
    api_page.wrong_constructors,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_docs_are_honest(check: Callable[[Pages], list[str]]) -> None:
    problems = check(PAGES)
    assert not problems, "\n".join(["", *problems])


def test_the_metrics_of_the_docs_are_those_of_a_running_application(tmp_path: Path) -> None:
    exported = exported_metrics(tmp_path)
    problems = metrics.wrong_metrics(PAGES, exported) + metrics.missing_metrics(PAGES, exported)
    assert not problems, "\n".join(["", *problems])


def test_every_extra_exists_and_is_mentioned() -> None:
    assert {scheme.extra for scheme in SCHEMES.values() if scheme.extra} <= extras()
    assert not [name for name in extras() - {"all"} if f"onward[{name}]" not in "".join(PAGES.values())]


def test_every_exception_is_listed() -> None:
    assert not unlisted(errors), "add these to __all__ of onward.errors, and to the API page"


def test_a_class_that_is_not_listed_is_found() -> None:
    module = ModuleType("made_up")
    module.__dict__.update(__all__=["Listed"], Listed=type("Listed", (), {"__module__": "made_up"}))
    module.__dict__["Forgotten"] = type("Forgotten", (Exception,), {"__module__": "made_up"})
    assert unlisted(module) == ["Forgotten"]


WRONG = [  # what a check must find; each of these was possible before
    (commands.wrong_commands, "`onward runn shop:app`", "there is no command `onward runn`"),
    (commands.wrong_commands, "see `onward\ndead lst`", "there is no command `onward dead lst`"),
    (
        commands.wrong_commands,
        "```\nonward run shop:app --worker 3   three\n```",
        "`onward run` has no option --worker",
    ),
    (commands.wrong_commands, "```sh\nONWARD_APP=a:b onward tail t --jsn\n```", "`onward tail` has no option --jsn"),
    (commands.wrong_commands, "```ini\nExecStart=/opt/bin/onward rn a:b\n```", "there is no command `onward rn`"),
    (commands.wrong_commands, "`onward --verbose`", "`onward ` has no option --verbose"),
    (commands.wrong_commands, "```\nonward run a:b \\\n    --turbo 3\n```", "`onward run` has no option --turbo"),
    (commands.wrong_commands, "`cd x && onward run a:b && onward fly`", "there is no command `onward fly`"),
    (
        commands.wrong_commands,
        "```yaml\n  command: [onward, helth, --ready]\n```",
        "there is no command `onward helth`",
    ),
    (
        commands.wrong_commands,
        '```dockerfile\nENTRYPOINT ["/bin/onward", "run", "--turbo"]\n```',
        "`onward run` has no option --turbo",
    ),
    (commands.wrong_commands, "with `--dry`", "no command has --dry"),
    (commands.wrong_targets, "`make tests`", "no target 'tests'"),
    (commands.wrong_targets, "`cd x && make fly`", "no target 'fly'"),
    (settings.wrong_settings, "`max_inflight`", "no setting or keyword is named max_inflight"),
    (settings.wrong_settings, "`drain_s` (30)", "no setting or keyword is named drain_s"),
    (settings.wrong_settings, "`kafka://h?client.a=1&replicas=3`", "no setting is named replicas"),
    (settings.wrong_settings, '```toml\nurl = "x"\nlease = 1\n```', "no setting is named lease"),
    (settings.wrong_settings, "```toml\nlease = 1\n```", "no setting is named lease"),
    (settings.wrong_settings, '```toml\n[client]\na.b = "x"\n[onward]\nlease_s = 1\n```', "no setting is named onward"),
    (settings.wrong_values, "`auto_create=False`", "no setting or keyword is named auto_create"),
    (settings.wrong_values, "`batch_size=10, threads=4`", "no setting or keyword is named threads"),
    (settings.wrong_values, "`topic_count=`", "no setting or keyword is named topic_count"),
    (settings.wrong_values, '`durability="paranoid"`', "durability cannot be 'paranoid'"),
    (settings.wrong_values, '`ordering="keys"`', "ordering cannot be 'keys'"),
    (settings.wrong_values, "`partitions=0`", "partitions cannot be 0"),
    (settings.wrong_values, '```toml\nfile_mode = "public"\n```', "file_mode cannot be 'public'"),
    (settings.wrong_settings, "`ONWARD_LEASE`", "Onward reads no variable ONWARD_LEASE"),
    (settings.wrong_defaults, "`lease_s` (20 s)", "the default of lease_s is [10.0], not 20"),
    (settings.wrong_defaults, "`lease_s` (30 s)", "the default of lease_s is [10.0], not 30"),
    (settings.wrong_defaults, "`max_event_bytes`\n(2 MiB)", "the default of max_event_bytes is [1048576], not 2"),
    (names.wrong_names, "`from onward import Handler`", "onward has no Handler"),
    (names.wrong_names, "```python\nfrom onward.errors import Full\n```", "onward.errors has no Full"),
    (
        names.wrong_names,
        "```python\nfrom onward import (\n    Event,  # (what\n    Nothing as N,\n)\n```",
        "onward has no Nothing",
    ),
    (names.wrong_names, "`onward.context.now()`", "onward.context.now does not exist"),
    (names.wrong_names, "`app.start()`", "Onward has no start"),
    (names.wrong_names, "```python\nshop = Onward()\nshop.go()\n```", "Onward has no go"),
    (names.wrong_names, "`app.dead.remove(id)`", "app.dead has no remove"),
    (names.wrong_classes, "it raises `BacklogFull`", "no public class is named BacklogFull"),
    (names.wrong_classes, "it raises `Full(reason)`", "no public class is named Full"),
    (names.wrong_keywords, "`Onward(url, partition=3)`", "Onward has no keyword partition"),
    (
        names.wrong_keywords,
        '```python\n@app.handler("t", threads=3)\ndef f(x): ...\n```',
        "handler has no keyword threads",
    ),
    (names.wrong_keywords, "`Retry(tries=3)`", "Retry has no keyword tries"),
    (names.wrong_keywords, "`Retry(tries=5, ...)`", "Retry has no keyword tries"),
    (names.wrong_keywords, "`Retry(tries=5, …)`", "Retry has no keyword tries"),
    (
        fixed_values.wrong_lists,
        "| exit code | meaning |\n|---|---|\n| 0 | a |\n| 1 | b |\n| 2 | c |\n| 4 | d |\n| 130 | e |",
        "exit code: 4 does not exist, 3 is missing",
    ),
    (
        fixed_values.wrong_lists,
        "| path | answer |\n|---|---|\n| `/health/live` | a |\n| `/health/ready` | b |\n| `/metrics` | c |",
        "path of the endpoint: /readings is missing",
    ),
    (
        fixed_values.wrong_lists,
        "| reason |\n|-|\n| `worn_out` |\n| `refused` |\n| `undecodable` |\n| `expired` |\n| `crashed` |\n| `lost` |",
        "reason of a dead letter: worn_out does not exist, exhausted is missing",
    ),
    (
        fixed_values.wrong_lists,
        "The label `status` is `loading`, `queued`, `running`, `delayed`, `stamping` or `leaving`.",
        "status of an event: stamping does not exist, marking is missing",
    ),
    (fixed_values.wrong_exit_codes, "It exits with 7.", "no exit code is 7"),
    (fixed_values.wrong_exit_codes, "```ini\nRestartPreventExitStatus=7\n```", "no exit code is 7"),
    (
        fixed_values.wrong_paths,
        "```yaml\n  httpGet: {path: /healthz, port: 9464}\n```",
        "the endpoint does not serve /healthz",
    ),
    (fixed_values.wrong_paths, "`/health/alive`", "the endpoint does not serve /health/alive"),
    (links.wrong_links, '<img src="pictures/none.gif" width="680">', "no file pictures/none.gif"),
    (links.wrong_links, "[start](start.md#nothing)", "start.md has no heading #nothing"),
    (names.wrong_files, "`examples/none.py`", "no file examples/none.py"),
    (names.wrong_files, "`python -m bench.none`", "no module bench.none"),
    (names.wrong_files, "`pip install 'onward[none]'`", "no extra none"),
    (
        api_page.private_imports,
        "`from onward.flow.plane import Plane`",
        "onward.flow.plane.Plane is not on the API page",
    ),
]


@pytest.mark.parametrize(("check", "text", "what"), WRONG, ids=[what for _, _, what in WRONG])
def test_a_wrong_name_is_found(check: Callable[[Pages], list[str]], text: str, what: str) -> None:
    page = f"# Title\n\nSome words.\n\n{text}\n"
    (problem,) = [each for each in check({"docs/x.md": page, api_page.API: PAGES[api_page.API]}) if "docs/x.md" in each]
    assert problem.startswith("docs/x.md:")
    assert problem.endswith(f": {what}")


def test_a_problem_names_the_line() -> None:
    assert names.wrong_files({"docs/x.md": "one\n\n```\nls\ncat src/none.py\n```\n\nor `docs/none.md`\n"}) == [
        "docs/x.md:5: no file src/none.py",
        "docs/x.md:8: no file docs/none.md",
    ]


def test_wrong_and_missing_metrics_are_found() -> None:
    exported = {"onward_lag_open", "onward_lag_gap", "onward_events_done_total"}
    right = {"docs/x.md": "`onward_lag_open`, `_gap`, `onward_events_done_total`"}
    assert not metrics.wrong_metrics(right, exported) + metrics.missing_metrics(right, exported)
    wrong = {"docs/x.md": "`onward_lag_opened`, `_done`"}
    assert metrics.wrong_metrics(wrong, exported) == [
        "docs/x.md:1: no metric is named onward_lag_opened",
        "docs/x.md:1: no metric is named _done",
    ]
    assert len(metrics.missing_metrics(wrong, exported)) == 3


def test_a_command_that_no_page_shows_is_found() -> None:
    without = {name: text.replace("onward dead export", "onward dead") for name, text in PAGES.items()}
    assert commands.missing_commands(without) == ["no page shows `onward dead export`"]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("| `stop()` | ask", "| `halt()` | ask", "onward.Onward has no public halt"),
        ("| `stop()` | ask", "| `halt()` | ask", "the table of onward.Onward lacks stop"),
        ("| `factor` | 2 |", "| `factor` | 3 |", "the default of `factor` of onward.Retry is 2.0, not 3"),
        (
            '| `ordering` | `"key"`',
            '| `ordering` | `"none"`',
            "the default of `ordering` of onward.Onward.handler is 'key'",
        ),
        ("`Closed` | the", "`Shut` | the", "the table of onward.errors lacks Closed"),
        ("| `jitter` |", "| `shake` |", "the table of onward.Retry lacks jitter"),
        ("| `types` | all", "| `kinds` | all", "the table of onward.Onward.handler lacks types"),
        ("`idempotency_key(event, *, group=None)`", "`idempotency_key(event)`", "idempotency_key(event) is really"),
    ],
)
def test_a_wrong_table_of_the_api_page_is_found(old: str, new: str, what: str) -> None:
    page = PAGES[api_page.API]
    assert old in page
    assert any(what in problem for problem in api_page.wrong_tables({api_page.API: page.replace(old, new)}))


def test_a_wrong_constructor_on_the_api_page_is_found() -> None:
    page = PAGES[api_page.API].replace("Webhook(url, *, timeout_s=10.0)", "Webhook(url, timeout_s=5.0)")
    (problem,) = api_page.wrong_constructors({api_page.API: page})
    assert problem.endswith("Webhook(url, timeout_s=5.0) is really Webhook(url, *, timeout_s=10.0)")
