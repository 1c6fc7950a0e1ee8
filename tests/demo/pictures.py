"""Takes the pictures of the README from a real run of the demo: `python -m tests.demo.pictures`.

It writes docs/pictures/demo-light.png, demo-dark.png and demo.gif. It needs Chromium and, besides the group `test`,
Pillow: `pip install pillow`. Start it on an idle machine, so that the frames of the GIF are evenly spaced.
"""

import base64
import bisect
import importlib
import io
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.demo.running import Running
from tests.servers.chromium import FLAGS
from tests.servers.needs import CHROMIUM

PICTURES = Path(__file__).parent.parent.parent / "docs" / "pictures"
WIDTH, HEIGHT = 1280, 864
GIF_SIZE = (960, 648)
FRAMES_PER_S = 8
COLOURS = 255
MOST_PNG_BYTES, MOST_GIF_BYTES = 250_000, 2_000_000
PATIENCE_S = 30.0


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with demo() as running, sync_playwright() as playwright:
        options = [flag for flag in FLAGS if flag != "--headless"]
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM.path), args=options)
        film = Film(open_page(browser, running, "light"))
        act(film)
        film.page.close()
        film.save(PICTURES / "demo.gif")
        take_stills([open_page(browser, running, scheme) for scheme in ("light", "dark")])
        browser.close()
    for path in sorted(PICTURES.iterdir()):
        most = MOST_GIF_BYTES if path.suffix == ".gif" else MOST_PNG_BYTES
        assert path.stat().st_size <= most, f"{path} has {path.stat().st_size:,} bytes"


@contextmanager
def demo() -> Iterator[Running]:
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = int(found.getsockname()[1])
        running = Running(Path(folder), port, burst=10_000)
        try:
            yield running
        finally:
            running.end(signal.SIGINT)


def open_page(browser: Browser, running: Running, scheme: Any) -> Page:
    size: Any = {"width": WIDTH, "height": HEIGHT}
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.goto(f"http://127.0.0.1:{running.port}/")
    expect(page.locator("#events tr:visible")).to_have_count(11, timeout=PATIENCE_S * 1000)
    return page


class Film:
    """What a page shows, frame by frame, with the time of each frame."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._frames: list[tuple[float, bytes]] = []
        self._chromium = page.context.new_cdp_session(page)
        self._chromium.on("Page.screencastFrame", self._add)
        self._chromium.send("Page.startScreencast", {"format": "png", "everyNthFrame": 2})

    def _add(self, frame: dict[str, Any]) -> None:
        self._frames.append((frame["metadata"]["timestamp"], base64.b64decode(frame["data"])))
        self._chromium.send("Page.screencastFrameAck", {"sessionId": frame["sessionId"]})

    def roll(self, seconds: float, until: Callable[[], bool] = lambda: True) -> None:
        """Record for some seconds, and then until the condition holds."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end or not until():
            assert now < end + PATIENCE_S, "what the film waits for did not happen"
            self.page.wait_for_timeout(100)
        assert [self.page.locator(name).inner_text() for name in ("#lost", "#inverted")] == ["0", "0"]

    def press(self, button: Locator) -> None:
        """By keyboard, so that the focus ring shows which button it is."""
        button.focus()
        self.roll(0.4)
        self.page.keyboard.press("Enter")

    def save(self, path: Path) -> None:
        image = importlib.import_module("PIL.Image")
        times, data = zip(*self._frames, strict=True)
        # The newest frame at each tick of the GIF's clock.
        ticks = [times[0] + i / FRAMES_PER_S for i in range(int((times[-1] - times[0]) * FRAMES_PER_S) + 1)]
        chosen = [data[bisect.bisect_right(times, tick) - 1] for tick in ticks]
        smooth = image.Resampling.LANCZOS
        pictures = [image.open(io.BytesIO(each)).convert("RGB").resize(GIF_SIZE, smooth) for each in chosen]
        palette = palette_of(image, pictures)
        frames = [picture.quantize(palette=palette, dither=image.Dither.NONE) for picture in pictures]
        lengths = [1000 // FRAMES_PER_S] * (len(frames) - 1) + [1500]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=lengths, loop=0, disposal=1)


def palette_of(image: Any, pictures: list[Any]) -> Any:
    """One palette for all frames: then a pixel that does not change is the same in every frame, and costs nothing."""
    chosen = pictures[:: max(1, len(pictures) // 24)]
    strip = image.new("RGB", (chosen[0].width, chosen[0].height * len(chosen)))
    for i, picture in enumerate(chosen):
        strip.paste(picture, (0, i * picture.height))
    return strip.quantize(COLOURS, method=image.Quantize.MAXCOVERAGE, kmeans=2)  # keeps the colours of small dots


def act(film: Film) -> None:
    """A worker is killed, its partitions are taken over; a poison order, its dead letter, its replay."""
    page = film.page
    log, letters = page.locator("#log"), page.locator("#dead-letters > li")
    film.roll(1.0)
    film.press(page.get_by_role("button", name="Kill a worker"))
    film.roll(1.0)
    film.roll(0.5, lambda: page.locator("#partitions .orphan").count() == 0)
    film.press(page.get_by_role("button", name="Send a poison order"))
    film.roll(1.0, lambda: letters.count() == 1)
    film.roll(0.8, lambda: "have run" in page.locator("#customers .held").inner_text())
    film.press(letters.get_by_role("button", name="Replay"))
    film.roll(0.8, lambda: "was replayed and handled" in log.inner_text())


def take_stills(pages: list[Page]) -> None:
    """A burst with a kill, a dead letter, and a customer that waits."""
    page = pages[0]
    page.get_by_role("button", name="Burst").click()
    page.wait_for_timeout(1500)
    page.get_by_role("button", name="Kill a worker").click()
    expect(page.locator("#log")).to_contain_text("burst: all orders handled", timeout=4 * PATIENCE_S * 1000)
    page.get_by_role("button", name="Send a poison order").click()
    expect(page.locator("#dead-letters > li")).to_have_count(1, timeout=PATIENCE_S * 1000)
    expect(page.locator("#waiting .none")).to_be_visible(timeout=PATIENCE_S * 1000)
    page.get_by_role("button", name="Send a poison order").click()
    expect(page.locator("#customers .story")).to_contain_text("attempt 2 of 3 failed", timeout=PATIENCE_S * 1000)
    page.wait_for_timeout(1200)
    image = importlib.import_module("PIL.Image")
    shown = [page.screenshot() for page in pages]  # both before the slow saving, so that they show the same moment
    for picture, name in zip(shown, ("demo-light.png", "demo-dark.png"), strict=True):
        image.open(io.BytesIO(picture)).convert("RGB").save(PICTURES / name, optimize=True)


if __name__ == "__main__":
    main()
