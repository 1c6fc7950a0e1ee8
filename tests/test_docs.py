"""The docs' table of brokers is what the brokers say of themselves, and their example runs."""

import asyncio
import re
import signal
from pathlib import Path

from onward import Onward, settings
from onward.brokers import SCHEMES, open_broker
from onward.brokers.base import Features
from tests.cli.shell import Shell
from tests.examples import ROOT, shown, source
from tests.servers.redis import RedisServer


def test_the_table_of_brokers_is_true(tmp_path: Path, redis_server: RedisServer) -> None:
    text = (ROOT / "docs/brokers.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- features -->\n(.*?)<!-- /features -->", text, re.DOTALL)
    urls = {"sqlite": f"sqlite:///{tmp_path}/features.db", "kafka": "kafka://localhost:1", "redis": redis_server.url}
    assert {scheme.label for scheme in SCHEMES.values()} == {SCHEMES[name].label for name in urls}
    rows = [_row(scheme, asyncio.run(_features(url))) for scheme, url in urls.items()]
    assert table.splitlines()[2:] == rows


def test_every_link_of_the_docs_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_example_of_the_engines_is_the_one_that_runs(tmp_path: Path) -> None:
    code = source("engines.py")
    assert shown("docs/engines.md") == code
    shell = Shell(tmp_path)
    try:
        shell.write("engines.py", code)
        app = Onward(f"sqlite:///{tmp_path}/engines.db")
        app.publish_sync("files", b"content", key="a.txt")
        running = shell.start("run", "engines:app")
        for told in ("a file has come", "stored a.txt under fence 1", "digest a.txt ed7002b4"):
            running.saw(told)
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
    cells = [yes(each) for each in flags]
    return f"| `{scheme}://` | {features.durability} | {' | '.join(cells)} | {starts} |"
