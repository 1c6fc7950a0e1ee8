"""The page in a real browser."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.demo.running import Running

expect.set_options(timeout=40_000)  # for what must come: a busy browser takes longer than its five seconds


@pytest.fixture
def faults(page: Page) -> Iterator[list[str]]:
    """What a visitor would find in the browser's console; the test fails on any."""
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    yield found
    assert found == []


def url(demo: Running) -> str:
    return f"http://127.0.0.1:{demo.port}/"


@pytest.mark.slow
@pytest.mark.usefixtures("faults")
def test_a_newcomer_tries_to_break_it(page: Page, demo: Running) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url(demo))
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#lanes li")).to_have_count(8)
    expect(page.locator("#events tr:visible").first).to_be_visible()
    page.get_by_role("button", name="Burst 500 orders").click()
    page.get_by_role("button", name="Kill worker 1").click()
    expect(page.locator("#log")).to_contain_text("killed with SIGKILL")
    expect(page.locator("#workers li").first).to_contain_text("replaced in")
    page.get_by_role("button", name="Send a poison order").click()
    expect(page.locator("#dead")).to_have_text("1")
    expect(page.locator("#dead-letters tr")).to_have_count(1)
    expect(page.locator("#dead-letters .why")).to_contain_text("CardDeclined")
    page.get_by_role("button", name="Replay order").click()
    expect(page.locator("#log")).to_contain_text("was replayed and handled")
    expect(page.locator("#dead")).to_have_text("0")
    expect(page.locator("#letters")).to_contain_text("None.")
    expect(page.locator("#log")).to_contain_text("all of it handled")
    expect(page.locator("#lost")).to_have_text("0")
    expect(page.locator("#inverted")).to_have_text("0")
    expect(page.locator("#alarm")).to_be_hidden()
    assert [request for request in asked if not request.startswith((url(demo), "data:"))] == []


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_it_fits_the_screen(page: Page, demo: Running, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(url(demo))
    expect(page.locator("#workers li")).to_have_count(3)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_it_comes_back_when_the_demo_does(page: Page, demo: Running, tmp_path: Path) -> None:
    page.goto(url(demo))
    expect(page.locator("#link")).to_have_text("live")
    demo.end(signal.SIGINT)
    expect(page.locator("#link")).to_have_text("reconnecting")
    again = Running(tmp_path, demo.port)
    try:
        expect(page.locator("#link")).to_have_text("live")
    finally:
        again.end(signal.SIGINT)
