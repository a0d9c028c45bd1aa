"""The plan of the house: a module imports only from below, and mathematics knows nothing but mathematics."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "samkit"

# From the ground up. A room may import the rooms before it in this list.
ROOMS = (
    "samkit._arguments",
    "samkit",
    "samkit.perturb",
    "samkit.optim",
    "samkit.surface",
    "samkit.sharpness",
    "samkit.landscapes",
    "samkit.diagonal",
    "samkit.data",
    "samkit.models",
    "samkit.attribution",
    "samkit.parallel",
    "samkit.training",
    "samkit.results",
    "samkit.claims",
    "samkit.experiments",
    "samkit.plot",
    "samkit.live",
)
MATHEMATICS = ROOMS[ROOMS.index("samkit.perturb") : ROOMS.index("samkit.data")]
# Plots, notebooks, files and progress bars: what mathematics must not know.
WORLDLY = ("matplotlib", "IPython", "ipywidgets", "tqdm", "pathlib", "json", "os", "io")
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imports(path: Path) -> set[str]:
    """Every module that a file imports, those inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} uses a relative import"
            found.add(node.module)
            if node.module == "samkit":
                found |= {f"samkit.{alias.name}" for alias in node.names} & set(ROOMS)
    return found


def test_every_module_has_its_place_in_the_plan() -> None:
    assert {room_of(module_name(path)) for path in FILES} <= set(ROOMS)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_room_imports_only_from_the_rooms_below_it(path: Path) -> None:
    here = room_of(module_name(path))
    below = ROOMS[: ROOMS.index(here)]
    ours = {room_of(name) for name in imports(path) if name.split(".")[0] == "samkit"}
    assert ours <= {here, *below}


@pytest.mark.parametrize(
    "path", [path for path in FILES if room_of(module_name(path)) in MATHEMATICS], ids=module_name
)
def test_mathematics_knows_no_plots_notebooks_files_or_progress_bars(path: Path) -> None:
    assert {name.split(".")[0] for name in imports(path)}.isdisjoint(WORLDLY)


def test_import_samkit_loads_nothing_heavy_beside_torch() -> None:
    code = "import sys, torch; before = set(sys.modules); import samkit; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {name.split(".")[0] for name in loaded.split()} == {"samkit"}
