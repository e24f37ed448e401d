"""Headless Chromium, once for all tests, and pages that are made once. Needs both houses: an analysis has every picture."""

import shutil

import pytest
from playwright.sync_api import sync_playwright

import file_formats
import laboratory_formats
from blockcache.report.html import render
from blockcache.report.overview.page import page as document
from blockcache.report.overview.sources import Source, Sources, load_sources
from blockcache.solvers import solve
from blockcache_lab.pages.analysis import brought
from made_up_policy import NASTY, named_schedule, recording
from toy_analysis import toy_analysis

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# no sandbox: CI runs as root; the others keep Chromium from calling home, which would be no request of the page
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="session")
def chromium():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path, "no Chromium here; 'make test-browser' installs it"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """By name: one with every kind of figure, a large family's, and one whose names are hostile."""
    place = tmp_path_factory.mktemp("pages")
    write = {example.name: example.write for example in (*file_formats.EXAMPLES, *laboratory_formats.EXAMPLES)}
    kinds = ("results", "timings", "distances", "tuning", "benchmark")
    every = load_sources({kind: write[kind](place) for kind in kinds})
    whole = Sources(brought=(Source("analysis.safetensors", brought(toy_analysis())),))
    large = recording(28, 20)
    wide = Sources(recordings=(Source("r", large),), schedules=(Source("s", solve(large, updates=4, union=5)),))
    nasty = Sources(schedules=(Source(NASTY, named_schedule(NASTY)),), command=NASTY)
    found = {"results": every, "analysis": whole, "large": wide, "nasty": nasty}
    for name, sources in found.items():
        (place / f"{name}.html").write_text(render(document(sources)))
    return {name: place / f"{name}.html" for name in found}


class Opened:
    """A page in the browser, and everything that it said or asked for."""

    def __init__(self, tab, path):
        self.tab, self.path, self.complaints, self.asked = tab, path, [], []
        tab.on("console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text))
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.route("**/*", self._decide)
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-drawn]")

    def _decide(self, route):
        if route.request.url == self.path.as_uri() and not self.asked:
            self.asked.append(route.request.url)
            route.continue_()
        else:
            self.asked.append(route.request.url)
            route.abort()


@pytest.fixture
def opened(chromium, pages):
    """Opens a page by its name, in a window of its own."""
    contexts = []

    def open_page(name, width=1200, scheme="light"):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        return Opened(contexts[-1].new_page(), pages[name])

    yield open_page
    for context in contexts:
        context.close()
