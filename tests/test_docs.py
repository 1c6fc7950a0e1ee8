"""The links and the table of brokers in the docs are right, and the example of the engines runs. See tests/docs too."""

import asyncio
import re
import signal
from pathlib import Path

from onward import Onward, settings
from onward.brokers import SCHEMES, open_broker
from onward.brokers.base import Features
from tests.cli.shell import Shell
from tests.docs.honest.links import anchors, wrong_links
from tests.examples import ROOT, shown, source
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.redis import RedisServer


def test_the_table_of_brokers_shows_their_features(
    tmp_path: Path, redis_server: RedisServer, rabbitmq_server: RabbitMQServer
) -> None:
    text = (ROOT / "docs/brokers.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- features -->\n(.*?)<!-- /features -->", text, re.DOTALL)
    urls = {"sqlite": f"sqlite:///{tmp_path}/features.db", "kafka": "kafka://localhost:1", "redis": redis_server.url}
    with rabbitmq_server.vhost() as vhost:
        urls["amqp"] = rabbitmq_server.url_of(vhost)
        assert {scheme.label for scheme in SCHEMES.values()} == {SCHEMES[name].label for name in urls}
        rows = [_row(scheme, asyncio.run(_features(url))) for scheme, url in urls.items()]
    assert table.splitlines()[2:] == rows


def test_every_link_and_picture_of_the_docs_leads_to_a_file_and_a_heading() -> None:
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    problems = wrong_links({path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files})
    assert not problems, "\n".join(["", *problems])


def test_a_heading_is_linked_as_github_does() -> None:
    assert anchors("# One `app.dead`, two!\n\ntext\n## What is-where\n") == ["one-appdead-two", "what-is-where"]


def test_the_example_of_the_engines_is_the_one_that_runs(tmp_path: Path) -> None:
    code = source("engines.py")
    assert shown("docs/engines.md") == code
    shell = Shell(tmp_path)
    try:
        shell.write("engines.py", code)
        app = Onward(f"sqlite:///{tmp_path}/engines.db")
        app.publish_sync("files", b"content", key="a.txt")
        running = shell.start("run", "engines:app")
        for line in ("a file has arrived", "stored a.txt under fence 1", "digest a.txt ed7002b4"):
            running.saw(line)
        running.send(signal.SIGTERM)
        assert running.ended() == 0
    finally:
        shell.close()


async def _features(url: str) -> Features:
    broker = await open_broker(settings.load(url))
    await broker.close()
    return broker.features


def _row(scheme: str, features: Features) -> str:
    def yes(value: bool) -> str:
        return "yes" if value else "no"

    starts = ", ".join(sorted(features.starts))
    flags = (features.stable_positions, features.fence, features.aside, features.shared, features.fenced_publish)
    cells = [yes(each) for each in (*flags, features.append_in)]
    return f"| `{scheme}://` | {features.durability} | {' | '.join(cells)} | {starts} |"
