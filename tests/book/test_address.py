"""`make address` on a copy: the new address everywhere, the old one nowhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OLD, NEW = PROJECT["urls"]["Repository"].removeprefix("https://github.com/"), "sharp-minds/flat-minima"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository's own files in a new folder; what .gitignore names, and git itself, stay behind."""
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    new = tmp_path / "copy"
    shutil.copytree(ROOT, new, ignore=shutil.ignore_patterns(".git", *ignored))
    return new


def address(folder: Path) -> subprocess.CompletedProcess:
    tool = [sys.executable, str(folder / "book/tools/address.py"), str(folder)]
    return subprocess.run(tool, capture_output=True, text=True, check=False)


def set_url(folder: Path, url: str) -> None:
    config = folder / "_config.yml"
    text = re.sub(r"(?m)^  url: .*$", f"  url: {url}", config.read_text(encoding="utf-8"))
    config.write_text(text, encoding="utf-8")


def holders(folder: Path, words: str) -> list[str]:
    """Files that contain the words; tests may name the placeholder, which they test."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "tests" not in path.relative_to(folder).parts:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if words in text:
                found.append(path.relative_to(folder).as_posix())
    return found


def test_the_new_address_goes_everywhere_and_the_old_one_is_gone(copy: Path) -> None:
    before = holders(copy, OLD)
    set_url(copy, f"https://github.com/{NEW}")
    result = address(copy)
    assert result.returncode == 0, result.stderr
    assert holders(copy, OLD) == []
    assert holders(copy, NEW) == before
    assert {"README.md", "CITATION.cff", "pyproject.toml", "book/setup_cell.py"} <= set(before)
    notebooks = sorted(path.relative_to(copy).as_posix() for path in copy.glob("notebooks/*.ipynb"))
    assert notebooks
    assert set(notebooks) <= set(before)


def test_nothing_but_the_address_changes_and_there_is_a_way_back(copy: Path) -> None:
    files = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    for name in (NEW, OLD):
        set_url(copy, f"https://github.com/{name}")
        assert address(copy).returncode == 0
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == files


def test_an_edited_setup_cell_is_put_right(copy: Path) -> None:
    notebook = sorted(copy.glob("notebooks/*.ipynb"))[0]
    raw = json.loads(notebook.read_text(encoding="utf-8"))
    next(cell for cell in raw["cells"] if cell["cell_type"] == "code")["source"] = ["import samkit"]
    notebook.write_text(json.dumps(raw), encoding="utf-8")
    assert address(copy).returncode == 0
    assert notebook.read_bytes() == (ROOT / "notebooks" / notebook.name).read_bytes()


@pytest.mark.parametrize("url", ["https://github.com/owner", "github.com/a/b", "https://github.com/a/b.git/"])
def test_an_address_that_colab_could_not_open_is_refused_and_nothing_is_written(copy: Path, url: str) -> None:
    set_url(copy, url)
    before = holders(copy, OLD)
    result = address(copy)
    assert result.returncode != 0
    assert url in result.stderr
    assert holders(copy, OLD) == before
