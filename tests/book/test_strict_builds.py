"""The build is strict: shown by breaking a copy of the book cut down to two small pages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
# A number that is new whenever the cell is executed, and one that depends on samkit.
CELL = "import time, samkit\nprint(f'executed at {time.time_ns()} with samkit {samkit.__version__}')"
INDEX = "# A small book\n\nSee [the notebook](../notebooks/small.ipynb).\n"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The book's own configuration, styles and extensions around two small pages."""
    for part in ("samkit", "book/_ext", "book/_static", "book/_templates"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("_config.yml", "requirements.lock", "Makefile", "book/references.bib"):
        shutil.copy(ROOT / part, tmp_path / part)
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nchapters:\n  - file: notebooks/small\n", encoding="utf-8"
    )
    (tmp_path / "book/index.md").write_text(INDEX, encoding="utf-8")
    (tmp_path / "notebooks").mkdir()
    write_notebook(tmp_path, CELL)
    return tmp_path


def write_notebook(book: Path, code: str) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# Small"), nbformat.v4.new_code_cell(code)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, book / "notebooks/small.ipynb")


def build(book: Path) -> subprocess.CompletedProcess:
    """Run the command of `make book` in the copy, with the copy's samkit."""
    rule = r"^book: .*\n\t\$\(BIN\)/(jupyter-book build .*)"
    (command,) = re.findall(rule, (book / "Makefile").read_text(), re.MULTILINE)
    script, *arguments = command.split()
    return subprocess.run(
        [str(Path(sys.executable).with_name(script)), *arguments],
        cwd=book,
        env=os.environ | {"PYTHONPATH": str(book), "JUPYTER_PREFER_ENV_PATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def shown(book: Path) -> tuple[str, str]:
    result = build(book)
    assert result.returncode == 0, result.stderr
    page = (book / "_build/html/notebooks/small.html").read_text(encoding="utf-8")
    return re.search(r"executed at (\d+) with samkit ([\d.]+)", page).groups()


def test_a_change_in_samkit_or_the_lock_file_executes_the_notebooks_again(small: Path) -> None:
    first, version = shown(small)
    assert shown(small) == (first, version), "nothing changed: the cache should have served the page"
    init = small / "samkit/__init__.py"
    init.write_text(init.read_text(encoding="utf-8").replace(f'"{version}"', '"9.9.9"'), encoding="utf-8")
    second, changed = shown(small)
    assert second != first
    assert changed == "9.9.9"
    with (small / "requirements.lock").open("a", encoding="utf-8") as lock:
        lock.write("# changed\n")
    assert shown(small)[0] not in (first, second)


def test_a_warning_fails_the_build(small: Path) -> None:
    (small / "book/index.md").write_text(INDEX + "\nSee [nothing](no_such_page.md).\n", encoding="utf-8")
    result = build(small)
    assert result.returncode != 0
    assert "no_such_page" in result.stderr + result.stdout


def test_an_unknown_name_inside_samkit_fails_the_build(small: Path) -> None:
    reference = "\n```{eval-rst}\nSee :func:`samkit.no_such_function`.\n```\n"
    (small / "book/index.md").write_text(INDEX + reference, encoding="utf-8")
    result = build(small)
    assert result.returncode != 0
    assert "samkit.no_such_function" in result.stderr + result.stdout


def test_a_raising_cell_fails_the_build_each_time(small: Path) -> None:
    write_notebook(small, "raise RuntimeError('this cell is broken')")
    for _ in range(2):
        result = build(small)
        assert result.returncode != 0
        assert "this cell is broken" in result.stderr + result.stdout


def test_too_many_code_cells_fail_the_build(small: Path) -> None:
    cells = [nbformat.v4.new_code_cell("1 + 1") for _ in range(31)]
    notebook = nbformat.read(small / "notebooks/small.ipynb", as_version=4)
    notebook.cells += cells
    nbformat.write(notebook, small / "notebooks/small.ipynb")
    result = build(small)
    assert result.returncode != 0
    assert "visible code cells" in result.stderr + result.stdout
