"""A headless Chromium for tests of the pages, driven by Playwright."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

SCREENSHOTS = Path(__file__).resolve().parent.parent / ".screenshots"
"""Pictures of the pages, kept by CI; git ignores the folder."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """A browser of the system; None leaves it to Playwright's own, if `playwright install chromium` has been run."""
    found = (shutil.which(name) for name in (os.environ.get("BATCHINFER_TEST_BROWSER", ""), *NAMES) if name)
    return next((path for path in found if path), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser. Without one this fails and says how to get it: a test that is left out proves nothing."""
    with sync_playwright() as playwright:
        try:
            # in a container, as root, there is neither a sandbox nor much shared memory
            browser = playwright.chromium.launch(
                executable_path=find_browser(), args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
            )
        except Exception as error:
            raise AssertionError(
                "no Chromium: apt-get install chromium, or python -m playwright install chromium"
            ) from error
        try:
            yield browser
        finally:
            browser.close()


def watch(page: Page, url: str, faults: list[str]) -> Page:
    """Collect what a page must not do: errors in its scripts, refused content, requests to other hosts."""
    page.on("pageerror", lambda error: faults.append(f"script: {error}"))
    # what a server refuses is told as an error, too; the tests look at those answers themselves
    page.on(
        "console",
        lambda line: (
            faults.append(f"console: {line.text}")
            if line.type == "error" and "Failed to load resource" not in line.text
            else None
        ),
    )
    host = urlsplit(url).netloc
    page.on(
        "request",
        lambda request: (
            faults.append(f"request: {request.url}")
            if urlsplit(request.url).netloc != host and not re.match("data:|blob:", request.url)
            else None
        ),
    )
    page.set_default_timeout(20_000)
    return page


def picture(page: Page, name: str) -> None:
    """Keep a picture of the whole page."""
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
