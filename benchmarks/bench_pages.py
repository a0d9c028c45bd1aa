"""The built book as a browser meets it: what each page weighs, and how soon it shows something.

Budgets: a chapter with its scripts and styles at most 1.5 MB compressed and its images 3 MB more; the first
content within 1 s from a local server. Needs the built book and Chromium.
"""

from __future__ import annotations

import functools
import gzip
import http.server
import shutil
import statistics
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from playwright.sync_api import sync_playwright

HTML = Path(__file__).parents[1] / "_build/html"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
IMAGES = (".png", ".svg", ".jpg")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def weights(urls: set[str]) -> tuple[float, float]:
    """Megabytes, compressed as a server would: of images, and of everything else."""
    images = rest = 0.0
    for url in urls:
        data = (HTML / unquote(urlsplit(url).path).lstrip("/")).read_bytes()
        if url.endswith(IMAGES):
            images += len(data) / 1e6
        else:
            rest += len(gzip.compress(data)) / 1e6
    return images, rest


def main() -> None:
    if not (HTML / "index.html").is_file():
        print("pages: build the book first (make book)")
        return
    handler = functools.partial(Quiet, directory=HTML)
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        sync_playwright() as playwright,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}"
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        print(f"{'page':50} {'MB':>6} {'images MB':>10} {'first content s':>16}")
        for path in [HTML / "book/index.html", *sorted((HTML / "notebooks").glob("*.html"))]:
            name = path.relative_to(HTML).as_posix()
            paints, urls = [], set()
            for _ in range(5):
                page = browser.new_page()
                page.on("request", lambda request, urls=urls: urls.add(request.url))
                page.goto(f"{home}/{name}", wait_until="networkidle")
                paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                paints.append(page.evaluate(paint) / 1000)
                page.close()
            images, rest = weights({url for url in urls if url.startswith(home)})
            print(f"{name:50} {rest:6.2f} {images:10.2f} {statistics.median(paints):16.2f}")
        browser.close()
        server.shutdown()
