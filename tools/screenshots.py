"""Pictures of the playground for the documentation, made in a headless Chromium against a running frontend.

Needs chromium-headless-shell (or chromium) and chromedriver on the PATH and selenium (`make test-services` brings
them), and a server of the model that is to be seen:

    python tools/serve.py recipes/tiny-chat &
    python tools/screenshots.py                            # docs/playground-light.png, docs/playground-dark.png
    python tools/screenshots.py picture                    # docs/playground-picture.png, with recipes/tiny-vlm-agg
    python tools/screenshots.py video                      # docs/playground-video.png, with recipes/tiny-video
    python tools/screenshots.py live                       # docs/observability-live.png, with any recipe under load
    python tools/screenshots.py timeline --request ID      # docs/observability-ID.png, of a request that it has had
    python tools/screenshots.py --url http://127.0.0.1:9001/ --folder /tmp
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models.training.picture_world import Thing, draw, png

SIZE = (1280, 820)
LIMIT_S = 30
WATCHED_S = 12
HIDDEN = ["timeline-form", "timeline-placement", "timeline-longest"]  # in the picture of a timeline
SEED = 7
RESULT = '{"degrees": 3, "sky": "sunny"}'
# What a browser would do besides showing the page, and the sandbox that root can't have.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", default=["light", "dark"], metavar="scene", help=", ".join(SCENES))
    parser.add_argument("--url", default="http://127.0.0.1:9000/", help="of the OpenAI frontend")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="where the pictures go")
    parser.add_argument("--request", default="", help="of the scene timeline: its x-request-id")
    options = parser.parse_args()
    if unknown := set(options.scenes) - set(SCENES):
        parser.error(f"scene {', '.join(sorted(unknown))}: choose from {', '.join(SCENES)}")
    with browser() as driver:
        for name in options.scenes:
            theme, act = SCENES[name]
            open_page(driver, options.url, theme)
            if name == "timeline":
                driver.get(f"{options.url}#timeline={options.request}")
            act(driver)
            shown = options.request if name == "timeline" else name
            path = options.folder / f"{PAGES.get(name, 'playground')}-{shown}.png"
            driver.save_screenshot(str(path))
            print(f"{path} {path.stat().st_size} bytes")
    return 0


@contextmanager
def browser(*flags: str) -> Iterator[webdriver.Chrome]:
    """A headless Chromium with a profile of its own; its console and its requests are in `get_log`."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, *flags):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(prefix="bireme-chromium-", ignore_cleanup_errors=True) as profile:
        options.binary_location = _program(Path(profile))
        options.add_argument(f"--user-data-dir={profile}")
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        driver.set_script_timeout(LIMIT_S)
        try:
            yield driver
        finally:
            driver.quit()


def _program(folder: Path) -> str:
    """Return what starts the browser: the headless shell, which has no windows of its own to draw, or all of Chromium.

    The shell opens no page unless it is told to, and chromedriver, which waits for one, hands flags over alone.
    """
    if (shell := shutil.which("chromium-headless-shell")) is None:
        return shutil.which("chromium") or ""
    script = folder / "browser.sh"
    script.write_text(f'#!/bin/sh\nexec {shell} "$@" about:blank\n')
    script.chmod(0o755)
    return str(script)


def open_page(driver: webdriver.Chrome, url: str, theme: str) -> None:
    metrics = {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get(url)
    driver.execute_script("localStorage.clear()")
    driver.refresh()
    _wait(driver, lambda: driver.find_element(By.ID, "model").is_enabled())
    if (new_chat := driver.find_element(By.ID, "new-chat")).is_displayed():
        new_chat.click()


def thinking(driver: webdriver.Chrome) -> None:
    """A sum that is thought about, with its thoughts and what it cost."""
    _example(driver, "Think first")
    _answered(driver, 1)
    for part in (".reasoning summary", ".stats summary"):
        driver.find_element(By.CSS_SELECTOR, part).click()


def calling(driver: webdriver.Chrome) -> None:
    """A tool call, its result, and the answer."""
    _example(driver, "Call a tool")
    _answered(driver, 1)
    driver.find_element(By.CSS_SELECTOR, ".call textarea").send_keys(RESULT + Keys.ENTER)
    _answered(driver, 2)


def seeing(driver: webdriver.Chrome) -> None:
    """Two questions about a drawn picture."""
    scene = (Thing(0, "red", "star"), Thing(4, "blue", "circle"), Thing(8, "green", "triangle"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shapes.png"
        path.write_bytes(png(draw(scene, random.Random(SEED))))
        driver.find_element(By.CSS_SELECTOR, ".composer .tray .file").send_keys(str(path))
        _wait(driver, lambda: bool(driver.find_elements(By.CSS_SELECTOR, ".thumbnail")))
    _ask(driver, "Describe the picture.")
    _answered(driver, 1)
    _ask(driver, "Where is the blue circle?")
    _answered(driver, 2)


def filming(driver: webdriver.Chrome) -> None:
    """A video, made and played."""
    fields = {"prompt": "a red circle moving right", "size": "64x64", "seconds": "2", "seed": str(SEED)}
    for name, value in fields.items():
        driver.find_element(By.ID, f"video-{name}").send_keys(value)
    driver.find_element(By.ID, "video-make").click()
    _wait(driver, lambda: driver.find_element(By.ID, "video-result").is_displayed())
    pause = "const player = document.getElementById('video-player'); player.pause(); player.currentTime = 1"
    driver.execute_script(pause)
    seen = "const {readyState, seeking} = document.getElementById('video-player'); return readyState >= 2 && !seeking"
    _wait(driver, lambda: driver.execute_script(seen))


def watching(driver: webdriver.Chrome) -> None:
    """The live view, once it has seen some seconds."""
    driver.find_element(By.ID, "show-live").click()
    points = "return document.querySelector('.tile-line polyline')?.points.length ?? 0"
    _wait(driver, lambda: driver.execute_script(points) > WATCHED_S)
    _fit(driver, "live")


def explaining(driver: webdriver.Chrome) -> None:
    """A request's timeline: the drawing and what took the time."""
    _wait(driver, lambda: bool(driver.find_elements(By.CSS_SELECTOR, "#timeline-causes li")))
    driver.execute_script(f"for (const id of {HIDDEN}) document.getElementById(id).hidden = true")
    _fit(driver, "timeline")


# name -> theme, and what is done on the page
SCENES: dict[str, tuple[str, Callable[[webdriver.Chrome], None]]] = {
    "light": ("light", thinking), "dark": ("dark", calling), "picture": ("light", seeing), "video": ("light", filming),
    "live": ("light", watching), "timeline": ("light", explaining),
}  # fmt: skip
PAGES = {
    "live": "observability",
    "timeline": "observability",
}  # whose pictures they are, where it is not the playground's


def _example(driver: webdriver.Chrome, title: str) -> None:
    next(card for card in driver.find_elements(By.CSS_SELECTOR, ".example") if title in card.text).click()
    _ask(driver, "")


def _ask(driver: webdriver.Chrome, text: str) -> None:
    driver.find_element(By.ID, "prompt").send_keys(text + Keys.ENTER)


def _answered(driver: webdriver.Chrome, number: int) -> None:
    ended = "return document.querySelectorAll('.answer:not(.streaming)').length"
    _wait(driver, lambda: driver.execute_script(ended) == number)


def _fit(driver: webdriver.Chrome, view: str) -> None:
    """Make the window as high as a view's content."""
    parts = f"[...document.getElementById('{view}').children].map((part) => part.getBoundingClientRect().bottom)"
    height = int(driver.execute_script(f"return Math.max(...{parts})")) + 48
    metrics = {"width": SIZE[0], "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def _wait(driver: webdriver.Chrome, condition: Callable[[], bool]) -> None:
    WebDriverWait(driver, LIMIT_S).until(lambda _: condition())


if __name__ == "__main__":
    raise SystemExit(main())
