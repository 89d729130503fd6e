"""A real Chromium for the tests of the page, and why there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The path of a Chromium: LONGCTX_CHROMIUM, or what the system has."""
    return os.environ.get("LONGCTX_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Watch:
    """Notes what pages complain of, how their policy is broken, and which hosts they call."""

    def __init__(self) -> None:
        self._troubles: list[str] = []
        self._hosts: set[str] = set()

    def page(self, page: Page) -> None:
        """Watch a page, from before it is loaded."""
        page.on("console", lambda message: self._troubles.append(message.text))
        page.on("pageerror", lambda error: self._troubles.append(str(error)))
        page.on("request", lambda request: self._hosts.add(urlsplit(request.url).netloc))
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (e) => console.error('policy', e.violatedDirective));"
        )

    def check(self, url: str) -> None:
        """Nothing but `url`'s host was called, and nothing was wrong."""
        # The browser itself notes a refused connection and every answer that is an error; tests bring those about.
        assert [text for text in self._troubles if "Failed to load resource" not in text] == []
        assert self._hosts - {""} == {urlsplit(url).netloc}  # data: has no host


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser; skips the test where there is none."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium here: `make browser` installs Debian's, LONGCTX_CHROMIUM names another")
    with sync_playwright() as playwright:
        # Its sandbox needs rights that a container's root does not have; it opens nothing but our own page.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
