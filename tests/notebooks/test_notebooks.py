"""What must hold of every notebook, read from its source: nothing here runs a cell."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SETUP_CELL = (ROOT / "book" / "setup_cell.py").read_text(encoding="utf-8").rstrip("\n")
HIDDEN = {"hide-input", "hide-cell", "remove-input", "remove-cell"}
BOXES = {"theory", "guess", "limits", "takeaways"}
DRAWS = re.compile(r"\bplot\.\w+\(|\bplt\.\w+\(")


def source(cell: dict) -> str:
    return "".join(cell["source"])


def tags(cell: dict) -> set[str]:
    return set(cell["metadata"].get("tags", ()))


class Notebook:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw = json.loads(path.read_text(encoding="utf-8"))
        self.cells = self.raw["cells"]
        self.code = [cell for cell in self.cells if cell["cell_type"] == "code"]
        self.markdown = [source(cell) for cell in self.cells if cell["cell_type"] == "markdown"]
        self.text = "\n\n".join(self.markdown)
        self.visible = [cell for cell in self.code if not tags(cell) & HIDDEN]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Notebook:
    return Notebook(request.param)


def test_chapters_are_numbered_without_gaps_and_every_other_name_starts_otherwise() -> None:
    numbers = [path.name[:2] for path in NOTEBOOKS if re.match(r"\d\d", path.name)]
    assert numbers == [f"{number:02d}" for number in range(1, len(numbers) + 1)]
    assert all(re.fullmatch(r"\d\d(_[a-z0-9]+)+\.ipynb|[a-z]\w*\.ipynb", path.name) for path in NOTEBOOKS)


def test_every_chapter_is_in_the_table_of_contents() -> None:
    contents = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    assert re.findall(r"notebooks/(\w+)", contents) == [path.stem for path in NOTEBOOKS]


def test_no_outputs_are_stored(notebook: Notebook) -> None:
    assert [cell["outputs"] for cell in notebook.code if cell["outputs"]] == []
    assert {cell["execution_count"] for cell in notebook.code} == {None}


def test_the_kernel_is_python3(notebook: Notebook) -> None:
    assert notebook.raw["metadata"]["kernelspec"]["name"] == "python3"


def test_every_cell_has_an_id_of_its_own(notebook: Notebook) -> None:
    ids = [cell["id"] for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


def test_the_title_comes_first_and_once(notebook: Notebook) -> None:
    assert notebook.cells[0]["cell_type"] == "markdown"
    assert notebook.markdown[0].startswith("# ")
    assert len(re.findall(r"^# ", notebook.text, re.MULTILINE)) == 1


def test_headings_go_down_one_level_at_a_time(notebook: Notebook) -> None:
    levels = [len(marks) for marks in re.findall(r"^(#+) ", notebook.text, re.MULTILINE)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_first_code_cell_is_the_setup_cell(notebook: Notebook) -> None:
    setup = notebook.code[0]
    assert source(setup) == SETUP_CELL, "`make address` copies book/setup_cell.py into it"
    assert "hide-input" in tags(setup)


def test_markdown_is_plain(notebook: Notebook) -> None:
    prose = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", "", notebook.text, flags=re.DOTALL)
    assert re.findall(r"^\s*[`~:]{3,}\s*\{.*|^:::.*", prose, re.MULTILINE) == [], "a directive: raw in Colab"
    assert re.findall(r"\{[\w:-]+\}`[^`]*`", prose) == [], "a role: raw in Colab"
    assert re.findall(r"^\([\w-]+\)=$|^\+\+\+|^%", prose, re.MULTILINE) == [], "MyST syntax: raw in Colab"


def test_boxes_open_and_close_in_one_cell_around_blank_lines_without_headings(notebook: Notebook) -> None:
    for text in notebook.markdown:
        assert len(re.findall(r"<div", text)) == len(re.findall(r"</div>", text))
        for kind, body in re.findall(r'<div class="([^"]*)">(.*?)</div>', text, re.DOTALL):
            assert kind in BOXES
            assert body.startswith("\n\n"), f"Markdown in a {kind} box needs a blank line before it"
            assert body.endswith("\n\n"), f"Markdown in a {kind} box needs a blank line after it"
            assert not re.search(r"^#", body, re.MULTILINE), f"a heading inside a {kind} box"


@pytest.mark.parametrize("kind", sorted(BOXES))
def test_every_chapter_has_each_kind_of_box(notebook: Notebook, kind: str) -> None:
    assert f'<div class="{kind}">' in notebook.text


def test_the_guess_is_answered_in_a_fold(notebook: Notebook) -> None:
    assert re.search(r'<div class="guess">.*?<details>.*?<summary>', notebook.text, re.DOTALL)


def test_the_opening_states_objectives_prerequisites_and_times(notebook: Notebook) -> None:
    opening = "\n".join(notebook.markdown[:3]).lower()
    for word in ("objectives", "prerequisites", "time to learn", "run time"):
        assert word in opening, f"the opening does not state the {word}"


def test_equation_numbers_are_the_chapter_s_and_count_up(notebook: Notebook) -> None:
    chapter = int(notebook.path.name[:2])
    numbers = re.findall(r"\\tag\{(\d+)\.(\d+)\}", notebook.text)
    assert numbers == [(str(chapter), str(count)) for count in range(1, len(numbers) + 1)]
    assert numbers, "a chapter numbers its equations with \\tag"


def test_at_most_thirty_code_cells_and_150_lines_are_visible(notebook: Notebook) -> None:
    assert len(notebook.visible) <= 30
    lines = [line for cell in notebook.visible for line in source(cell).splitlines() if line.strip()]
    assert len(lines) <= 150


def test_every_figure_has_alt_text_a_caption_and_a_name(notebook: Notebook) -> None:
    for cell in notebook.code:
        if DRAWS.search(source(cell)):
            mystnb = cell["metadata"].get("mystnb", {})
            start = source(cell)[:60]
            assert len(mystnb.get("image", {}).get("alt", "")) >= 40, f"no alt text: {start}"
            assert len(mystnb.get("figure", {}).get("caption", "")) >= 20, f"no caption: {start}"
            assert re.fullmatch(r"fig-[a-z0-9-]+", mystnb["figure"].get("name", "")), f"no name: {start}"


def test_figure_names_differ_through_the_whole_book() -> None:
    names = [
        cell["metadata"]["mystnb"]["figure"]["name"]
        for path in NOTEBOOKS
        for cell in Notebook(path).code
        if "figure" in cell["metadata"].get("mystnb", {})
    ]
    assert len(set(names)) == len(names)


def test_nothing_is_downloaded_or_read_from_the_repository(notebook: Notebook) -> None:
    code = "\n".join(source(cell) for cell in notebook.code[1:])
    assert not re.search(r"https?://|!pip|%pip|\.\./|/home/|download=True", code)


def test_the_words_fit_the_time_to_learn(notebook: Notebook) -> None:
    prose = re.sub(r"\$\$.*?\$\$|<[^>]+>|\([^)\s]*://[^)\s]*\)", " ", notebook.text, flags=re.DOTALL)
    assert 1200 <= len(prose.split()) <= 3000
