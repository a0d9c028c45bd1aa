"""Every Python sample of the book's pages and of the README runs, in the order in which a reader meets it."""

import os
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

BOOK = Path(__file__).parents[2] / "book"

# A fence is either a snippet that continues the page, or a captioned file that is complete by itself.
FENCE = re.compile(
    r"^(?P<indent> *)```(?:python|\{code-block\} python\n:caption: (?P<file>\S+\.py))\n"
    r"(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


def samples(page: Path) -> list[re.Match]:
    return list(FENCE.finditer(page.read_text(encoding="utf-8")))


PAGES = [page for page in [*sorted(BOOK.glob("*.md")), BOOK.parent / "README.md"] if samples(page)]


@pytest.fixture
def random_state():
    """Samples seed the global generators, as a reader would; the other tests must not notice."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


def test_the_pages_that_teach_by_code_have_samples():
    assert {"training_loop.md", "troubleshooting.md", "README.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run_from_top_to_bottom(page, tmp_path, monkeypatch, random_state):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names = {"__name__": "__main__"}
    for sample in samples(page):
        if not sample["file"]:
            # Blank lines in front make a traceback name the line of the page.
            code = "\n" * text.count("\n", 0, sample.start("code")) + textwrap.dedent(sample["code"])
            exec(compile(code, page, "exec"), names)


def scripts() -> list:
    return [
        pytest.param(sample["code"], id=sample["file"])
        for page in PAGES
        for sample in samples(page)
        if sample["file"]
    ]


@pytest.mark.parametrize("code", scripts())
def test_a_whole_script_runs_on_two_ranks_as_its_page_says(code, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(code, encoding="utf-8")
    ranks = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            str(script),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ranks.returncode == 0, ranks.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_sample_hides_from_this_test(page):
    """A fence written another way would be shown to readers and never run."""
    fences = re.findall(r"^ *`{3,}.*\bpython\b.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == len(samples(page))


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == BOOK], ids=lambda page: page.stem)
def test_no_line_of_a_sample_runs_out_of_its_box(page):
    lines = [line for sample in samples(page) for line in sample["code"].splitlines()]
    assert [line for line in lines if len(line) > 80] == []
