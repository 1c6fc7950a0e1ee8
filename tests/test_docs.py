"""The docs' table of brokers is what the brokers say of themselves."""

import asyncio
import re
from pathlib import Path

from onward import settings
from onward.brokers import SCHEMES, open_broker
from onward.brokers.base import Features

ROOT = Path(__file__).parent.parent


def test_the_table_of_brokers_is_true(tmp_path: Path) -> None:
    text = (ROOT / "docs/brokers.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- features -->\n(.*?)<!-- /features -->", text, re.DOTALL)
    urls = {"sqlite": f"sqlite:///{tmp_path}/features.db", "kafka": "kafka://localhost:1"}
    rows = [_row(scheme, asyncio.run(_features(urls[scheme]))) for scheme in SCHEMES]
    assert table.splitlines()[2:] == rows


def test_every_link_of_the_docs_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


async def _features(url: str) -> Features:
    broker = await open_broker(settings.load(url))
    await broker.close()
    return broker.features


def _row(scheme: str, features: Features) -> str:
    def yes(value: bool) -> str:
        return "yes" if value else "no"

    starts = ", ".join(sorted(features.starts))
    cells = [yes(features.stable_positions), yes(features.fence), yes(features.aside)]
    return f"| `{scheme}://` | {features.durability} | {' | '.join(cells)} | {starts} |"
