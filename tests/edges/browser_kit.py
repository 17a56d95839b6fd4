"""A headless Chromium for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,700",
)


def tool(*names: str) -> str:
    found = [path for name in names if (path := shutil.which(name))]
    if not found:
        text = f"{names[0]} is missing; on Debian: apt-get install chromium chromium-driver"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    return found[0]


@contextlib.contextmanager
def open_browser(profile: Path, *flags: str) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = tool("chromium", "chromium-browser", "google-chrome")
    for flag in (*FLAGS, *flags, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options=options, service=Service(tool("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()
