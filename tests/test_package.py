"""The package as a stranger gets it: what wheel and sdist carry; and all lists of dependencies agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import samkit

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist, the wheel built from the sdist as an index would."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return out


def data_files() -> set[str]:
    """Every file of the package that is not Python, as a path from the repository's root."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "samkit").rglob("*")
        if path.suffix in (".toml", ".json", ".js")
    }


def test_the_wheel_carries_code_data_and_licence(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "samkit").rglob("*.py")}
    assert modules | data_files() <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [
        name
        for name in names
        if name.split("/")[0] not in ("samkit", wheel.name[: -len("-py3-none-any.whl")] + ".dist-info")
    ]


def test_the_sdist_carries_the_data_and_nothing_built(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert data_files() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/test_package.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "_build", ".git/", "node_modules"))]


def test_the_wheel_installs_and_reads_its_data_in_an_empty_folder(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import samkit, samkit.claims\n"
        "print(samkit.__file__, samkit.__version__, len(samkit.claims.ledger()))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    file, version, claims = shown.stdout.split()
    assert Path(file).is_relative_to(target)
    assert version == samkit.__version__
    assert int(claims) > 0


def names(requirements: list[str]) -> dict[str, str]:
    """Requirement names, spelled one way, with what follows the name."""
    pairs = (re.fullmatch(r"([\w.-]+)(\[[\w,]+\])?(.*)", line.replace(" ", "")) for line in requirements)
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[3] for match in pairs}


def test_conda_s_environment_lists_what_pyproject_lists() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [line for line in environment["dependencies"] if isinstance(line, str)]
    (pip,) = [line["pip"] for line in environment["dependencies"] if isinstance(line, dict)]
    listed = names([line for line in conda + pip if not line.startswith("-e")])
    assert listed.pop("python") == PROJECT["requires-python"]
    assert listed.pop("pip") == ""
    extras = PROJECT["optional-dependencies"]
    wanted = names(PROJECT["dependencies"] + [line for extra in extras.values() for line in extra])
    assert listed == wanted
    assert pip[-1] == "-e ."


def test_the_lock_file_pins_every_dependency_within_its_range_and_names_no_index() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pinned = names([line.split(";")[0].strip() for line in lock.splitlines() if "==" in line])
    extras = PROJECT["optional-dependencies"].values()
    for name in names(PROJECT["dependencies"] + [line for extra in extras for line in extra]):
        assert name in pinned, f"{name} is not locked: run make lock"
    assert "://" not in lock
    assert "--index" not in lock


def test_the_package_states_lower_bounds_only() -> None:
    assert all(re.fullmatch(r">=[\d.]+", bound) for bound in names(PROJECT["dependencies"]).values())


def test_citation_and_changelog_know_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == samkit.__version__
    assert f"## {samkit.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
