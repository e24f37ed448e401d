"""The pictures of docs/evaluate.md: a page in headless Chromium, in both themes and on a phone.

python tests/browser/screenshots.py report.html docs
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

COLOURS = 128  # a palette keeps the files small, and figures have few colours
# name: width, height, theme, what stands at the top
SHOTS = {
    "report-light.png": (1100, 1180, "light", "body"),
    "report-dark.png": (1100, 1240, "dark", "#where-errors-come-from"),
    "report-phone.png": (390, 844, "light", "#figure-front"),
}


def take(page: Path, directory: Path) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        for name, (width, height, theme, top) in SHOTS.items():
            tab = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
            )
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector("html[data-drawn]")
            tab.locator(top).evaluate("element => element.scrollIntoView()")
            picture = Image.open(io.BytesIO(tab.screenshot()))
            picture.convert("RGB").quantize(COLOURS).save(directory / name, optimize=True)
            tab.close()
        browser.close()


if __name__ == "__main__":
    take(Path(sys.argv[1]), Path(sys.argv[2]))
