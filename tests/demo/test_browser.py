"""The page in a real browser."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from onward.demo.follow import MOST_HELD_SHOWN
from tests.demo.running import Running

expect.set_options(timeout=40_000)  # the default of five seconds is too short on a busy machine


@pytest.fixture
def faults(page: Page) -> Iterator[list[str]]:
    """Errors in the browser's console. The test fails if there is one."""
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    yield found
    assert found == []


def url(demo: Running) -> str:
    return f"http://127.0.0.1:{demo.port}/"


@pytest.mark.slow
@pytest.mark.usefixtures("faults")
def test_a_new_user_tries_to_break_it(page: Page, demo: Running) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url(demo))
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#partitions li")).to_have_count(8)
    expect(page.locator("#events tr:visible").first).to_be_visible()
    page.get_by_role("button", name="Burst 500 orders").click()
    page.get_by_role("button", name="Kill worker 1").click()
    expect(page.locator("#log")).to_contain_text("killed with SIGKILL")
    expect(page.locator("#workers li").first).to_contain_text("killed, back in")
    page.get_by_role("button", name="Send a poison order").click()
    expect(page.locator("#dead")).to_have_text("1")
    expect(page.locator("#dead-letters > li")).to_have_count(1)
    expect(page.locator("#dead-letters .why")).to_contain_text("CardDeclined")
    page.get_by_role("button", name="Replay order").click()
    expect(page.locator("#log")).to_contain_text("was replayed and handled")
    expect(page.locator("#dead")).to_have_text("0")
    expect(page.locator("#letters")).to_contain_text("None.")
    expect(page.locator("#log")).to_contain_text("burst: all orders handled")
    expect(page.locator("#lost")).to_have_text("0")
    expect(page.locator("#inverted")).to_have_text("0")
    expect(page.locator("#alarm")).to_be_hidden()
    assert [request for request in asked if not request.startswith((url(demo), "data:"))] == []


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("width", [360, 768, 1280, 1440])
def test_the_page_fits_the_screen(page: Page, demo: Running, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(url(demo))
    expect(page.locator("#workers li")).to_have_count(3)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def customer(number: int, state: str, *, failed: int = 3, ran: int = 0, held: int = 0) -> dict[str, object]:
    """A poisoned customer, as in a snapshot of the stream."""
    orders = [(1000 + i, i < ran) for i in range(ran + held)][:MOST_HELD_SHOWN]
    wait = {"wait_s": 4.0, "next_in_s": 2.5}
    about = {"number": number, "customer": f"c-{number % 10_000:04d}", "partition": number % 8, "handled": False}
    return about | wait | {"state": state, "failed": failed, "ran": ran, "held": held, "orders": orders}


WAITING = [
    customer(1_234_567, "waiting", failed=2, held=17),
    customer(1_234_568, "running", ran=8, held=9),
    customer(1_234_569, "over", ran=17),
    customer(1_234_570, "waiting", failed=0, held=1),
]

OVERLAPS = """(waiting) => {
    showPartitions({ partitions: Array(8).fill({ open: 1250, worker: 1 }), workers: [{ alive: true }], waiting });
    showWaiting({ waiting, attempts: 3 });
    const texts = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode()); ) {
        if (!node.data.trim() || !node.parentElement.checkVisibility() || node.parentElement.closest("#log")) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        for (const { left, right, top, bottom } of range.getClientRects()) {
            const box = { node, left, right, top: top + 3, bottom: bottom - 3 };  // without the leading
            for (let each = node.parentElement; each; each = each.parentElement) {
                if (getComputedStyle(each).overflow === "visible") continue;
                const clip = each.getBoundingClientRect();
                [box.left, box.right] = [Math.max(box.left, clip.left), Math.min(box.right, clip.right)];
            }
            if (box.right > box.left && box.bottom > box.top) texts.push(box);
        }
    }
    const besides = (a, b) => a.node === b.node || a.right <= b.left + 1 || a.bottom <= b.top;
    return texts.flatMap((a, i) => texts.slice(i + 1)
        .filter((b) => !besides(a, b) && !besides(b, a))
        .map((b) => `${a.node.data} / ${b.node.data}`));
}"""  # pairs of texts that overlap, with these waiting customers

STORY_LINES = """(waiting) => {
    showWaiting({ waiting, attempts: 3 });
    return [...document.querySelectorAll("#customers .story")].map((story) => {
        const range = document.createRange();
        range.selectNodeContents(story);
        return range.getClientRects().length;
    });
}"""


@pytest.mark.usefixtures("faults")
def test_no_text_overlaps_another_with_four_waiting_customers(page: Page, demo: Running) -> None:
    page.goto(url(demo))
    expect(page.locator("#events tr:visible").first).to_be_visible()
    for width in range(360, 1601, 40):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(OVERLAPS, WAITING) == [], width
        assert max(page.evaluate(STORY_LINES, WAITING)) <= (1 if width > 760 else 2), width


@pytest.mark.usefixtures("faults")
def test_the_page_shows_eight_held_orders_and_counts_the_others(page: Page, demo: Running) -> None:
    page.goto(url(demo))
    expect(page.locator("#workers li")).to_have_count(3)
    rows = """(waiting) => {
        showWaiting({ waiting, attempts: 3 });
        return [...document.querySelectorAll("#customers .orders")].map((list) => list.innerText.split(/\\s+/));
    }"""
    many, some, all_ran, one = page.evaluate(rows, WAITING)
    eight = [str(n) for n in range(1000, 1008)]
    assert many == some == all_ran == [*eight, "+9"]
    assert one == ["1000"]


def test_the_chart_of_a_burst_stays_in_its_frame(page: Page, demo: Running) -> None:
    page.goto(url(demo))
    expect(page.locator("#workers li")).to_have_count(3)
    heights = """() => {
        const history = [[20, 20], [9980, 400], [20, 800], [20, 20]];
        showRates({ history, rate: { published: 20, handled: 20 }, handled: [] });
        const line = document.querySelector("#spark-published").getAttribute("d");
        return [line.match(/[ML][^ML]+/g).map((point) => Number(point.split(" ")[1])), $("peak-published").innerText];
    }"""
    lines, peak = page.evaluate(heights)
    assert len(lines) == 4
    assert all(0 < y < 120 for y in lines)
    assert peak == "9,980"


def test_a_page_at_half_zoom_clears_all_of_its_canvas(page: Page, demo: Running) -> None:
    size = {"width": 1400, "height": 900, "deviceScaleFactor": 0.5, "mobile": False}
    page.context.new_cdp_session(page).send("Emulation.setDeviceMetricsOverride", size)
    page.goto(url(demo))
    expect(page.locator("#workers li")).to_have_count(3)
    left = """() => {
        const { width, height } = flow.canvas;
        flow.pen.fillRect(0, 0, 4000, 4000);
        flow.dots = [];
        flow.draw(performance.now());
        return flow.pen.getImageData(width - 1, height - 1, 1, 1).data[3];
    }"""
    assert page.evaluate(left) == 0


WATCH = """() => {
    window.seen = [];
    const all = (where, what) => [...document.querySelectorAll(where)].filter((node) => !node.hidden).map(what);
    const colour = (node) => node.style.getPropertyValue("--key");
    new MutationObserver(() => {
        for (const node of document.querySelectorAll("#customers > li")) seen.push({
            customer: node.querySelector(".key").textContent,
            colour: colour(node),
            story: node.querySelector(".story").textContent,
            held: node.querySelector(".held").textContent,
            ran: node.querySelectorAll(".orders .ran").length,
            handled: Number(document.querySelector("#handled").textContent.replaceAll(",", "")),
            marks: all("#partitions .waits", (mark) => mark.textContent),
            rows: all("#events .watched", (row) => [row.firstChild.firstChild.textContent, colour(row)]),
        });
    }).observe(document.querySelector("#waiting"), { subtree: true, childList: true, characterData: true });
}"""  # records the strip whenever it changes, so that no state of it is missed


@pytest.mark.slow
@pytest.mark.usefixtures("faults")
def test_a_poisoned_customer_is_seen_to_wait_while_the_others_go_on(page: Page, demo: Running) -> None:
    page.goto(url(demo))
    expect(page.locator("#events tr:visible").first).to_be_visible()
    expect(page.locator("#waiting .none")).to_be_visible()
    page.evaluate(WATCH)
    page.get_by_role("button", name="Send a poison order").click()
    expect(page.locator("#dead-letters .key")).to_have_count(1)
    expect(page.locator("#waiting .none")).to_be_visible()  # it is shown for a while, then forgotten
    expect(page.locator("#events tr.watched")).to_have_count(0)
    seen = page.evaluate("seen")
    customer, colour = page.locator("#dead-letters .key").inner_text(), seen[0]["colour"]
    assert {(each["customer"], each["colour"]) for each in seen} == {(customer, colour)}
    waiting = [each for each in seen if re.search(r": attempt \d of 3 failed, next in \d\.\d s", each["story"])]
    assert {"1", "2"} == {re.findall(r"attempt (\d)", each["story"])[0] for each in waiting}
    assert all(each["marks"] == [f"{customer} waits"] for each in waiting)
    assert re.fullmatch(r"\d+ orders held", waiting[-1]["held"])
    assert waiting[-1]["handled"] > waiting[0]["handled"]  # the others go on
    assert "is a dead letter now" in seen[-1]["story"]
    assert re.fullmatch(r"all \d+ held orders have run", seen[-1]["held"])
    assert seen[-1]["ran"] >= 3
    assert [row for each in seen for row in each["rows"]]
    assert all(row == [customer, colour] for each in seen for row in each["rows"])


@pytest.mark.slow
@pytest.mark.usefixtures("faults")
def test_dead_letters_open_by_keyboard_and_are_replayed_together(page: Page, demo: Running) -> None:
    page.goto(url(demo))
    expect(page.locator("#events tr:visible").first).to_be_visible()
    expect(page.get_by_role("button", name="Replay all")).to_be_hidden()
    page.get_by_role("button", name="Send a poison order").click()
    letter = page.locator("#dead-letters > li").last
    letter.locator("summary").focus()
    page.keyboard.press("Enter")
    number = letter.locator(".order").inner_text().removeprefix("order ")
    expect(letter.locator("pre.traceback")).to_contain_text("in bill")
    expect(letter.locator("pre.traceback")).to_contain_text("Traceback (most recent call last)")
    expect(letter.locator("pre.error")).to_contain_text("CardDeclined: order")
    payload = json.loads(letter.locator(".payload pre").inner_text())
    assert (payload["number"], payload["poison"]) == (int(number), True)
    expect(letter.locator(".headers")).to_contain_text(f"request-{number}")
    expect(letter.locator(".what-happened")).to_contain_text(re.compile(r"attempts\s*3, in .*bill"))
    for name in ("published", "first failure", "last failure"):
        expect(letter.locator(".what-happened")).to_contain_text(re.compile(rf"{name}\s*\d\d:\d\d:\d\d\.\d"))
    page.get_by_role("button", name="Send a poison order").click()
    expect(page.locator("#dead-letters > li")).to_have_count(2)
    expect(letter.locator("pre.traceback")).to_be_visible()  # it stays open
    page.get_by_role("button", name="Replay all 2").click()
    expect(page.locator("#replayed")).to_have_text("2 dead letters replayed")
    expect(page.locator("#letters .none")).to_be_visible()
    expect(page.locator("#dead")).to_have_text("0")
    expect(page.locator("#inverted")).to_have_text("0")


def test_the_page_explains_its_three_counts(page: Page, demo: Running) -> None:
    page.goto(url(demo))
    for name, words in {
        "lost": "never handled and not a dead letter",
        "inverted": "after a later order of the same customer. Replays do not count.",
        "duplicates": "called at least once; an inbox makes the effect happen once",
    }.items():
        meaning = page.locator(f"#{name}-box .meaning")
        expect(meaning).to_be_visible()
        expect(meaning).to_contain_text(words)


def expect_all_stopped(page: Page) -> None:
    expect(page.locator("#workers .state")).to_have_text(["stopped"] * 3)
    expect(page.locator("#workers .rate")).to_have_text(["0"] * 3)
    expect(page.locator("#workers .dead, #partitions .orphan")).to_have_count(0)
    expect(page.locator("#shop .stopped")).to_be_visible()
    for name in ("rate-published", "now-published", "now-handled"):
        expect(page.locator(f"#{name}")).to_have_text("0")


def test_the_page_shows_the_end_and_the_last_balance_and_comes_back(page: Page, demo: Running, tmp_path: Path) -> None:
    page.goto(url(demo))
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#ended")).to_be_hidden()
    out, _ = demo.end(signal.SIGINT)
    expect(page.get_by_role("alert")).to_contain_text("The demo has ended")
    expect(page.locator("#ended")).to_contain_text("All workers have stopped.")
    expect(page.locator("#ended")).to_contain_text("Start it again with the same command.")
    expect_all_stopped(page)
    balance = dict(re.findall(r"(\w+)=(\d+)", out))
    assert balance
    for name, value in balance.items():
        assert page.locator(f"#{name}").inner_text().replace(",", "") == value, name
    assert page.locator("main button:enabled").count() == 0
    again = Running(tmp_path, demo.port)
    try:
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#ended")).to_be_hidden()
        expect(page.get_by_role("button", name="Kill a worker")).to_be_enabled()
    finally:
        again.end(signal.SIGINT)


def test_the_page_notices_that_the_demo_was_killed(page: Page, demo: Running) -> None:
    page.goto(url(demo))
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#rate-published")).not_to_have_text("0")
    expect(page.locator("#shop .stopped")).to_be_hidden()
    demo.end(signal.SIGKILL)
    expect(page.locator("#ended")).to_contain_text("Its process does not answer any more.")
    expect(page.locator("#link")).to_have_text("ended")
    expect(page).to_have_title(re.compile("ended"))
    expect_all_stopped(page)
    assert page.locator("#published").inner_text() != "0"
