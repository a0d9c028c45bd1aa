"""The built book as a reader sees it: every page in headless Chromium, opened as a file and from a server."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from samkit.claims import ledger

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
HTML = ROOT / "_build/html"
CONTENTS = re.findall(r"(?:root|file): (\S+)", (ROOT / "_toc.yml").read_text(encoding="utf-8"))
CHAPTERS = [name for name in CONTENTS if name.startswith("notebooks/")]
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    chromium = next(filter(None, found), None)
    if chromium is None:
        pytest.fail("reading the book needs Chromium; on Debian: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a server on this machine offers the book."""
    handler = functools.partial(Quiet, directory=HTML)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@dataclass
class Visit:
    """An open page, with everything it asked for and complained about."""

    page: Page
    home: str
    name: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        """The page's Markdown."""
        path = ROOT / self.name
        if not path.with_suffix(".ipynb").exists():
            return path.with_suffix(".md").read_text(encoding="utf-8")
        cells = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
        return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


VISITS = [pytest.param((way, name), id=f"{way}-{name}") for way in ("file", "http") for name in CONTENTS]


@pytest.fixture(scope="module", params=VISITS)
def visit(request: pytest.FixtureRequest, browser: Browser, address: str) -> Iterator[Visit]:
    """Each page of the contents, as a file and served, with its mathematics typeset."""
    way, name = request.param
    assert (HTML / f"{name}.html").is_file(), f"{name} is not in the built book: run `make book`"
    page = browser.new_page(viewport=DESKTOP)
    visit = Visit(page, HTML.as_uri() if way == "file" else address, name)
    page.on("request", lambda request: visit.requests.append(request.url))
    page.on("requestfailed", lambda request: visit.complaints.append(f"no answer: {request.url}"))
    page.on("console", lambda said: said.type == "error" and visit.complaints.append(said.text))
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    page.goto(f"{visit.home}/{name}.html")
    page.evaluate("window.MathJax?.startup?.promise.then(() => null)")
    yield visit
    page.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport=DESKTOP)
    yield page
    page.close()


def test_nothing_is_asked_of_the_network_and_nothing_complains(visit: Visit) -> None:
    foreign = [url for url in visit.requests if not url.startswith((visit.home + "/", "data:", "blob:"))]
    assert len(visit.requests) > 5, "a page without styles and scripts?"
    assert foreign == []
    assert visit.complaints == []


def test_all_mathematics_is_typeset(visit: Visit) -> None:
    formulas = visit.page.locator(".bd-article .math")
    words = re.sub(r"`{3,}.*?`{3,}|`[^`]*`", "", visit.source, flags=re.DOTALL)
    if "$" in words or visit.name == "book/api_optim":
        assert formulas.count() > 0
    bare = formulas.filter(has_not=visit.page.locator("mjx-container"))
    assert bare.all_text_contents() == []
    assert visit.page.locator("mjx-merror, [data-mjx-error]").count() == 0
    prose = visit.page.evaluate(
        """() => {
            const article = document.querySelector(".bd-article").cloneNode(true);
            article.querySelectorAll("pre, code, script, style, mjx-container").forEach((e) => e.remove());
            return article.textContent;
        }"""
    )
    assert re.findall(r".{0,30}(?:\$|\\\(|\\\[|\\begin|\\tag).{0,30}", prose) == []


def test_every_image_loads_and_says_what_to_see(visit: Visit) -> None:
    images = visit.page.locator("img")
    faults = images.evaluate_all(
        "all => all.filter(i => !i.alt.trim() || !(i.complete && i.naturalWidth)).map(i => i.outerHTML)"
    )
    assert images.count() > 0, "not even the logo?"
    assert faults == []


def test_axe_finds_no_fault_in_the_content_by_day_or_night(visit: Visit) -> None:
    for scheme in ("light", "dark"):
        visit.page.evaluate("theme => (document.documentElement.dataset.theme = theme)", scheme)
        report = Axe().run(visit.page, context={"include": [[".bd-article"]]}).response
        assert len(report["passes"]) > 5, "axe looked at nothing"
        faults = [
            (fault["id"], node["html"])
            for fault in report["violations"]
            for node in fault["nodes"]
            # docutils gives a bibliography and its entries roles that ARIA has deprecated since
            if 'class="citation' not in node["html"]
        ]
        assert faults == [], scheme


def test_every_figure_is_numbered_and_has_a_caption(visit: Visit) -> None:
    captions = visit.page.locator(".bd-article figure:has(img) > figcaption").all_text_contents()
    assert len(captions) == visit.page.locator(".bd-article img").count()
    assert [text for text in captions if not re.match(r"\s*Fig\. \d+\.\d+\s+\w", text)] == []


def test_there_is_one_title_and_it_names_the_page(visit: Visit) -> None:
    (heading,) = visit.page.locator("h1:visible").all_inner_texts()
    title = re.sub(r"^\d+\. |\W+$", "", heading)
    assert title
    assert title in visit.page.title()


def test_a_phone_shows_the_whole_width(visit: Visit) -> None:
    visit.page.set_viewport_size(PHONE)
    try:
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        cut = visit.page.evaluate(
            """() => [...document.querySelectorAll(".bd-article *")]
                .filter((e) => e.matches("h1, h2, h3, p, li, figure, img, table, pre, mjx-container"))
                .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
                .filter((e) => {
                    for (let box = e; box; box = box.parentElement)
                        if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return false;
                    return true;
                }).map((e) => e.outerHTML.slice(0, 200))"""
        )
        assert cut == []
    finally:
        visit.page.set_viewport_size(DESKTOP)


def test_the_switch_turns_the_page_light_and_dark(visit: Visit) -> None:
    switch = visit.page.locator(".theme-switch-button:visible").first
    brightness = {}
    for _ in range(3):
        switch.click()
        theme = visit.page.locator("html").get_attribute("data-theme")
        paper = visit.page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")
        brightness[theme] = sum(int(part) for part in re.findall(r"\d+", paper)[:3]) / 3
    assert brightness["light"] > 230
    assert brightness["dark"] < 50


def test_every_link_within_the_book_leads_somewhere(visit: Visit) -> None:
    links = visit.page.locator("a[href]").evaluate_all("all => all.map(a => a.href)")
    inside = {link for link in links if link.startswith(visit.home)}
    assert inside
    for link in sorted(inside):
        path, _, place = link.removeprefix(visit.home + "/").partition("#")
        target = HTML / path.partition("?")[0]
        assert target.is_file(), link
        if place and target.suffix == ".html":
            assert f'id="{place}"' in target.read_text(encoding="utf-8"), link


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_can_be_downloaded_and_opened_in_colab(page: Page, address: str, name: str) -> None:
    page.goto(f"{address}/{name}.html")
    links = page.locator("a[href]").evaluate_all("all => all.map(a => a.href)")
    assert any(
        link.startswith("https://colab.research.google.com/") and link.endswith(f"{name}.ipynb")
        for link in links
    )
    (download,) = {link for link in links if link.startswith(address) and link.endswith(".ipynb")}
    notebook = page.request.get(download).json()
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert page.locator(".prev-next-footer a").count() == 2


LIVE = [name for name in CHAPTERS if "LiveFigure(" in (ROOT / f"{name}.ipynb").read_text(encoding="utf-8")]


def foretold(text: str) -> str:
    return text.partition(" It ends near")[0]


@pytest.mark.parametrize("name", LIVE)
def test_a_live_figure_answers_to_every_control_from_a_file(
    browser: Browser, name: str, evaluate: Callable
) -> None:
    page = browser.new_page(viewport=DESKTOP, has_touch=True, reduced_motion="reduce")
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
    page.goto(f"{HTML.as_uri()}/{name}.html")
    shown = re.findall(r'LiveFigure\(\\?"(\w+)', (ROOT / f"{name}.ipynb").read_text(encoding="utf-8"))
    figures = page.locator(".samkit-live").all()
    assert len(figures) == len(shown)
    for figure, module in zip(figures, shown, strict=True):
        drawing = figure.locator("svg[role=img]")
        controls = figure.locator("input, select")
        assert 1 <= controls.count() <= 3

        def drawn(drawing: Locator = drawing) -> tuple[str, str | None]:
            return drawing.inner_html(), drawing.get_attribute("aria-label")

        specified = evaluate(module, "m.figure.controls")
        for control, its in zip(controls.all(), specified, strict=True):
            before = drawn()
            assert control.evaluate("e => e.labels[0].innerText.trim()")
            control.focus()
            page.keyboard.press("ArrowRight" if control.get_attribute("type") == "range" else "ArrowDown")
            assert drawn() != before
            value = its["choices"][control.evaluate("e => e.selectedIndex")][0] if "choices" in its else None
            change = {its["key"]: float(control.input_value()) if value is None else value}
            width = round(figure.locator(".picture").bounding_box()["width"])
            view = "m.figure.view({ ...m.figure.state, ...data[0] }, data[1])"
            right = evaluate(module, view, [change, width])
            # Where a long walk ends depends on the last digit of the browser's exp and log.
            assert foretold(figure.locator(".says").inner_text()) == foretold(right["says"])
            assert foretold(drawing.get_attribute("aria-label")) == foretold(right["alt"])
            page.keyboard.press("ArrowLeft" if control.get_attribute("type") == "range" else "ArrowUp")
            assert drawn() == before
        for handle in figure.locator(".handle").all():
            before = drawn()
            handle.focus()
            for key in ("ArrowUp", "ArrowRight"):
                page.keyboard.press(f"Shift+{key}")
            by_keys = drawn()
            assert by_keys != before
            handle.scroll_into_view_if_needed()
            box = handle.bounding_box()
            x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
            page.mouse.move(x, y)
            page.mouse.down()
            page.mouse.move(x - 9, y - 9, steps=3)
            page.mouse.up()
            assert drawn() != by_keys
        for name_of_button in ("Step", "Play", "Back to start") if figure.locator(".player").count() else ():
            before = drawn()
            figure.get_by_role("button", name=name_of_button).click()
            assert drawn() != before
        assert figure.locator(".says").inner_text().strip() in (drawing.get_attribute("aria-label") or "")
    page.emulate_media(media="print")
    assert page.locator(".samkit-live svg[role=img]").first.is_visible()
    assert page.locator(".samkit-live :is(input, .handle):visible").count() == 0
    assert complaints == []
    page.close()


def test_a_page_prints_to_a_pdf_with_its_figures_and_answers_open(browser: Browser, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("pdf", ROOT / "book/tools/pdf.py")
    pdf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pdf)
    printed, bare = tmp_path / "printed/chapter.pdf", tmp_path / "bare.pdf"
    pdf.write(browser, HTML / f"{CHAPTERS[0]}.html", printed)
    pdf.write(browser, HTML / "book/notation.html", bare)
    assert printed.read_bytes().startswith(b"%PDF-")
    assert printed.read_bytes().count(b"/Subtype /Image") >= 3
    assert printed.stat().st_size > 3 * bare.stat().st_size


def test_the_served_search_finds_sharpness(page: Page, address: str) -> None:
    page.goto(f"{address}/search.html?q=sharpness")
    results = page.locator("#search-results ul.search > li a")
    expect(results.first).to_be_visible()
    expect(page.locator("#search-results")).to_contain_text(re.compile(r"found [1-9]\d* page"))
    assert page.request.get(results.first.evaluate("a => a.href")).ok


def test_the_claims_page_shows_each_settled_claim_with_its_verdict(page: Page, address: str) -> None:
    page.goto(f"{address}/book/claims.html")
    carded = [claim for claim in ledger().values() if claim.status != "planned"]
    assert page.locator(".claim[id]").count() == len(carded)
    for claim in carded:
        if claim.status == "needs scale":
            continue
        card = page.locator(f"#ledger-{claim.id.lower()}")
        assert card.locator(".claim-badge").first.inner_text() == claim.status
        assert card.locator(".claim .claim-badge").all_text_contents() == [claim.status]
        assert card.locator(".claim tbody tr").count() == len(claim.parts)


def test_the_run_times_page_has_a_row_for_each_chapter_within_the_budget_of_cells(
    page: Page, address: str
) -> None:
    page.goto(f"{address}/book/run_times.html")
    rows = page.locator(".bd-article tbody tr:has(a)").evaluate_all(
        "all => all.map(row => [row.querySelector('a').href, ...[...row.cells].map(cell => cell.innerText)])"
    )
    assert [row[0] for row in rows] == [f"{address}/{name}.html" for name in CHAPTERS]
    for _, title, seconds, cells in rows:
        assert title.strip()
        assert int(seconds) >= 0
        assert 1 <= int(cells) <= 30
