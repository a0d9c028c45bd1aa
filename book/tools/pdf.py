"""Print the single-page book with headless Chromium: equations typeset, live figures as their pictures.

Run by ``make pdf``, which builds the page first.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

NUMBER = '<p style="font: 8pt sans-serif; margin: auto"><span class="pageNumber"></span></p>'
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


def write(browser: Browser, page_file: Path, target: Path) -> None:
    """Print a page of the built book, once its mathematics and images are there."""
    page = browser.new_page(color_scheme="light")
    page.goto(page_file.resolve().as_uri(), timeout=120_000)
    page.wait_for_function("window.MathJax?.startup?.promise")
    page.evaluate("window.MathJax.startup.promise.then(() => null)")
    # Answers that are folded on the screen are open on paper; code that is folded stays away.
    page.evaluate("document.querySelectorAll('details:not(.hide)').forEach((e) => (e.open = true))")
    page.wait_for_function("[...document.images].every((i) => i.complete && i.naturalWidth)")
    target.parent.mkdir(parents=True, exist_ok=True)
    page.pdf(
        path=target,
        format="A4",
        margin={"top": "18mm", "bottom": "18mm", "left": "16mm", "right": "16mm"},
        display_header_footer=True,
        header_template="<span></span>",
        footer_template=NUMBER,
        outline=True,
        tagged=True,
    )
    page.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="folder of the singlehtml build")
    parser.add_argument("target", type=Path, help="the PDF to write")
    arguments = parser.parse_args()
    # Sphinx writes the page where the root document lies, with links that start at the top of the folder.
    whole = shutil.copy(arguments.build / "book/index.html", arguments.build / "whole.html")
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    chromium = next(filter(None, found), None)
    if chromium is None:
        raise SystemExit("make pdf needs Chromium; on Debian: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        write(browser, Path(whole), arguments.target)
        browser.close()
    print(f"{arguments.target}: {arguments.target.stat().st_size / 1e6:.1f} MB")
