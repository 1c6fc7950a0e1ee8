"""Chromium without a window, driven through its debugging port."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager

from playwright.sync_api import Page, sync_playwright

from tests.servers.needs import CHROMIUM
from tests.servers.server import PROBE_S, Server

FLAGS = (
    "--headless",
    "--no-sandbox",  # otherwise it refuses to run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class ChromiumServer(Server):
    name = "Chromium"
    address = "http://127.0.0.1:{port}"

    def command(self) -> list[str]:
        return [
            str(CHROMIUM.path),
            *FLAGS,
            f"--user-data-dir={self.folder / 'profile'}",
            f"--remote-debugging-port={self.port}",
        ]

    def probe(self) -> None:
        """It has opened its first page. A client that connects while it still starts may wait without end."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PROBE_S)
        try:
            connection.request("GET", "/json/list")
            if not any(target["type"] == "page" for target in json.load(connection.getresponse())):
                raise ConnectionError("Chromium has no page yet")
        finally:
            connection.close()

    @contextmanager
    def page(self) -> Iterator[Page]:
        """A page without cookies of other tests. asyncio.run() does not work inside: use the async client there."""
        with sync_playwright() as playwright:
            browser = playwright.chromium.connect_over_cdp(self.url)
            with closing(browser), browser.new_context() as context:
                yield context.new_page()
