"""The playground in a real browser, as a user sees it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

LIMIT_S = 90
FileContent = tuple[str, str, bytes]  # name, type, content
WIDE, NARROW = (1280, 860), (400, 800)
_FILES = """
    const files = new DataTransfer();
    for (const [name, type, bytes] of arguments[0])
      files.items.add(new File([Uint8Array.from(atob(bytes), (one) => one.charCodeAt(0))], name, { type }));
"""
_PASTE = "document.activeElement.dispatchEvent(new ClipboardEvent('paste', {clipboardData: files, ...bubbling}))"
_DROP = """
    const target = document.querySelector(arguments[1]);
    for (const name of ["dragover", "drop"])
      target.dispatchEvent(new DragEvent(name, {dataTransfer: files, ...bubbling}));
"""


class Page:
    """One visit, with nothing remembered from earlier ones."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self, size: tuple[int, int] = WIDE, theme: str = "light", wait: bool = True) -> Page:
        self.resize(*size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(self.url + "health/live")
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.driver.get(self.url)
        if wait:
            self.until(lambda: self.find("#model").is_enabled())
        return self

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    # Looking

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        """Return the text of the first match as it is shown, "" without one; at once, while the page changes."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText.trim() ?? ''", css))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def run_module(self, script: str, *arguments: Any) -> Any:
        """Run the body of an async function, which may import the page's modules as `await load(name)`."""
        wrapped = (
            "const done = arguments[arguments.length - 1];"
            "const load = (name) => import(`/playground/js/${name}`);"
            f"(async () => {{ {script} }})().then((value) => done([value]), (error) => done(String(error)));"
        )
        found = self.driver.execute_async_script(wrapped, *arguments)
        assert isinstance(found, list), found
        return found[0]

    def until(self, condition: Any, limit_s: float = LIMIT_S) -> Any:
        return WebDriverWait(self.driver, limit_s, 0.03).until(lambda _: condition())

    @property
    def announced(self) -> str:
        return str(self.find("#announcer").get_property("textContent"))

    @property
    def focused(self) -> str:
        """The id of the element with the focus, or its accessible name."""
        return str(self.run("const at = document.activeElement; return at.id || at.ariaLabel || at.textContent.trim()"))

    # Doing

    def click(self, css: str) -> None:
        self.find(css).click()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def ask(self, text: str) -> None:
        self.find("#prompt").send_keys(text + Keys.ENTER)

    def reload(self) -> None:
        self.driver.refresh()
        self.until(lambda: self.find("#model").is_enabled())

    def answered(self, number: int = 1) -> WebElement:
        """Return the last of so many answers, once it has ended."""
        self.until(lambda: len(self.all(".answer")) == number and not self.all(".answer.streaming"))
        return self.all(".answer")[-1]

    def asked(self, text: str, number: int = 1) -> str:
        """Ask and return the content of the answer."""
        self.ask(text)
        return str(self.answered(number).find_element(By.CSS_SELECTOR, ".content").text)

    def set(self, name: str, value: str) -> None:
        """Give a setting a value at once, as if typed."""
        script = (
            "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
            "field.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        self.run(script, name, value)

    def example(self, title: str) -> None:
        """Choose one of the examples and send it."""
        next(card for card in self.all(".example") if title in card.text).click()
        self.press(Keys.ENTER)

    def attach(self, *paths: Path) -> None:
        """Take these files in the browser's dialog, as pictures of the next message."""
        before = len(self.all(".composer .thumbnail"))
        self.find(".composer .tray .file").send_keys("\n".join(map(str, paths)))
        self.until(lambda: len(self.all(".composer .thumbnail")) == before + len(paths))

    def paste(self, *files: FileContent) -> None:
        """Paste files into what has the focus."""
        self._hand(_PASTE, "", *files)

    def drop(self, target: str, *files: FileContent) -> None:
        self._hand(_DROP, target, *files)

    def _hand(self, script: str, target: str, *files: FileContent) -> None:
        encoded = [(name, kind, base64.b64encode(content).decode()) for name, kind, content in files]
        self.run(f"{_FILES} const bubbling = {{bubbles: true, cancelable: true}}; {script}", encoded, target)

    # What the browser noticed

    def complaints(self) -> list[str]:
        """Return what stands in the console since the last call, failed requests aside."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE" and entry["source"] != "network"]

    def requested(self) -> set[str]:
        """Return the addresses of all requests since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
        return {str(message["params"]["request"]["url"]) for message in sent}
