"""A tab of the system's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

# No sandbox: tests may run as root in a container. The rest keeps the browser from asking the network for anything.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"]
OPTIONS += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("needs a browser: chromium or google-chrome on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=OPTIONS)
        yield browser
        browser.close()


@contextmanager
def new_tab(chromium: Browser) -> Iterator[Page]:
    """A tab with a profile of its own. A page that complains of anything fails."""
    complaints: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            complaints.append(message.text)

    with chromium.new_context() as context:
        page = context.new_page()
        page.on("console", listen)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page
    assert complaints == []


@pytest.fixture
def tab(chromium: Browser) -> Iterator[Page]:
    with new_tab(chromium) as page:
        yield page
