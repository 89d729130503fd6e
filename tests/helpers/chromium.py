"""A real Chromium for the tests of the page, and why there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The path of a Chromium: LONGCTX_CHROMIUM, or what the system has."""
    return os.environ.get("LONGCTX_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


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
