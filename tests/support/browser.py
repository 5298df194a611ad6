"""Debian's chromium, driven by its own driver, with a page that fails its test for what a good page never does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.groups import PROJECT

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
DEADLINE_S = 60
WATCH = """
window.watched = [];
addEventListener("securitypolicyviolation", (event) => watched.push(`violation of ${event.effectiveDirective}`));
addEventListener("error", (event) => watched.push(`error: ${event.message}`));
addEventListener("unhandledrejection", (event) => watched.push(`rejected: ${event.reason}`));
window.alert = () => watched.push("alert");
window.pending = 0;
const ask = window.fetch;
window.fetch = (...given) => { pending++; return ask(...given).finally(() => { pending--; }); };
"""


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Starts a browser without a window; it notes what every page logs and asks for."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.add_argument("--window-size=1280,1000")
    options.add_argument("--disable-background-networking")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        yield driver
    finally:
        driver.quit()


@contextmanager
def viewer(folders: Sequence[Path]) -> Iterator[str]:
    """Starts `python -m viewer` on a free port; yields the address that it prints."""
    with viewer_process(folders) as (_, address):
        yield address


@contextmanager
def viewer_process(folders: Sequence[Path]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts `python -m viewer` on a free port; yields the process and the address that it prints."""
    command = [sys.executable, "-m", "viewer", *map(str, folders), "--port", "0"]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield process, found[0]
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


class Page:
    """What a test does with a page, and sees on it."""

    def __init__(self, driver: webdriver.Chrome, address: str) -> None:
        self.driver = driver
        self.origin = address.partition("/#")[0]
        driver.get("about:blank")
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.forget()
        driver.get(address)
        self.until(lambda: self.all("header"), "the page")

    def go(self, address: str) -> None:
        """Follows an address of the pages, such as run/0/overview."""
        self.driver.execute_script("location.hash = arguments[0]", "#/" + address)

    def leave(self) -> None:
        """Goes where nothing is asked any more, before the viewer ends; fails for the faults until then."""
        assert self.faults() == []
        self.driver.get("about:blank")
        self.forget()

    def until(self, seen: Callable[[], Any], what: str) -> Any:
        """Waits until `seen` returns something; fails with `what` is missing and what the page shows."""
        redrawn = (StaleElementReferenceException, IndexError)  # while the page draws itself anew
        wait = WebDriverWait(self.driver, DEADLINE_S, poll_frequency=0.05, ignored_exceptions=redrawn)
        try:
            return wait.until(lambda _: seen())
        except Exception as error:
            raise AssertionError(f"{what} did not come; the page shows:\n{self.text()[:3000]}") from error

    def until_shown(self, text: str) -> None:
        self.until(lambda: text in self.text(), repr(text))

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.until(lambda: self.all(selector), selector)[0]  # type: ignore[no-any-return]

    def text(self) -> str:
        return str(self.driver.execute_script("return document.body.innerText"))

    def type(self, selector: str, text: str) -> None:
        """Types any text into a field; `send_keys` of older drivers refuses what is beyond the basic plane, as 🙂."""
        self.script("arguments[0].focus()", self.one(selector))
        self.driver.execute_cdp_cmd("Input.insertText", {"text": text})

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def size(self, width: int, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def forget(self) -> None:
        """Empties the logs, which hold what was before."""
        self.driver.get_log("browser")
        self.driver.get_log("performance")

    def faults(self) -> list[str]:
        """Returns errors of the console, violations, scripts that ran where none may, and requests to elsewhere."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        elsewhere = [url for url in asked if not f"{url}/".startswith((self.origin + "/", "about:", "data:"))]
        logged = [
            entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
        ]
        return [*self.script("return window.watched"), *logged, *(f"asked for {url}" for url in elsewhere)]
