"""A real browser for tests: Debian's Chromium, or whichever is there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 180_000  # milliseconds: a machine may be busy with other things
NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser, or a test that is skipped where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on this machine (on Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])  # tests may run as root
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path, *, width: int = 1100, dark: bool = False) -> Iterator[Any]:
    """A page from the file system; at the end there were no errors and no requests to anywhere else."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.trouble = []
    complain = page.trouble.append
    page.on("console", lambda message: complain(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complain(str(error)))
    page.on("request", lambda request: complain(request.url) if request.url.startswith("http") else None)
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready")
    yield page
    assert not page.trouble
    context.close()


def plot(page: Any, name: str) -> Any:
    """A plot, scrolled to and drawn."""
    figure = page.locator(f"[data-plot='{name}']")
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for()
    return figure


def traces(figure: Any) -> list[dict[str, Any]]:
    """What a plot shows: names and values of its traces."""
    shown: list[dict[str, Any]] = figure.locator(".canvas").evaluate(
        "canvas => canvas.data.map(trace => ({name: trace.name, x: [...trace.x], y: [...trace.y]}))"
    )
    return shown


def names(figure: Any) -> list[str]:
    """The optimizers that a plot shows."""
    return [trace["name"] for trace in traces(figure) if trace["name"]]
