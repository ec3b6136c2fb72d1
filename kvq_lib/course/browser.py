"""Headless Chromium: prints the book, and shows pages to the tests."""

import contextlib
import shutil
from collections.abc import Iterator

from ..errors import KVQError

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--no-first-run",
)


class NoBrowser(KVQError):
    """Chromium is not installed; the message says how to get it."""


@contextlib.contextmanager
def chromium() -> Iterator:
    """A running browser, Playwright's `Browser`, closed at the end.

    Raises:
        NoBrowser: none of `NAMES` is on the path.
    """
    from playwright.sync_api import sync_playwright

    # Not Playwright's own download, which comes from a host that not everyone reaches.
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise NoBrowser(
            f"no browser ({', '.join(NAMES)}): on Debian and Ubuntu run "
            "`apt-get install chromium fonts-dejavu-core fonts-liberation`"
        )
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield running
        running.close()
