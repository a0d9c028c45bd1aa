"""The ledger and the notebooks agree: every claim that has a chapter is settled there, once."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEDGER = tomllib.loads((ROOT / "samkit" / "claims.toml").read_text(encoding="utf-8"))
CLAIMS = {name: row for name, row in LEDGER.items() if isinstance(row, dict)}
STATUSES = {"reproduced", "reproduced in part", "not reproduced", "needs scale", "planned"}


def settling_cells() -> dict[int, list[str]]:
    """Chapter number -> the ids that its cells settle by a call of ``claim``."""
    found = {}
    for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        found[int(path.name[:2])] = [
            name for text in code for name in re.findall(r'\bclaim\(\s*"([A-Z]\d+)"', text)
        ]
    return found


@pytest.mark.parametrize("name", CLAIMS)
def test_every_row_is_complete(name: str) -> None:
    row = CLAIMS[name]
    for field in ("statement", "source", "chapter", "status"):
        assert row.get(field), f"{name} lacks {field}"
    assert row["status"] in STATUSES
    assert row.get("full_scale", "needs scale") == "needs scale"
    if row["status"] not in ("needs scale", "planned"):
        assert row["function"].startswith("samkit.experiments.")
        assert row["rule"], f"{name} has no decision rule"
        assert row["parts"], f"{name} has no machine-readable parts"


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_is_settled_by_exactly_one_cell_of_its_own_chapter(name: str) -> None:
    row, cells = CLAIMS[name], settling_cells()
    times = {chapter: Counter(names)[name] for chapter, names in cells.items() if name in names}
    if row["status"] in ("needs scale", "planned"):
        assert times == {}
    else:
        assert times == {row["chapter"]: 1}


@pytest.mark.parametrize("name", CLAIMS)
def test_planned_is_said_only_while_the_chapter_does_not_exist(name: str) -> None:
    row = CLAIMS[name]
    assert row["status"] != "planned" or row["chapter"] not in settling_cells()


def test_no_cell_settles_a_claim_that_the_ledger_does_not_have() -> None:
    assert {name for names in settling_cells().values() for name in names} <= set(CLAIMS)
