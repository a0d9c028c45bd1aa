"""The setup cell in its four places: beside samkit, elsewhere, in Colab with and without an address."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import samkit

CELL = (Path(__file__).parents[2] / "book/setup_cell.py").read_text(encoding="utf-8")
PLACEHOLDER = "https://github.com/OWNER/REPO"
ADDRESS = "https://github.com/sharp-minds/flat-minima"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the cell would run in a shell; nothing is run."""
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command))
    return asked


@pytest.fixture
def without_samkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def colab(monkeypatch: pytest.MonkeyPatch) -> None:
    google = ModuleType("google")
    google.colab = ModuleType("google.colab")
    monkeypatch.setitem(sys.modules, "google", google)
    monkeypatch.setitem(sys.modules, "google.colab", google.colab)


def run(address: str) -> None:
    exec(re.sub(r'(?m)^ADDRESS = ".*"$', f'ADDRESS = "{address}"', CELL), {})


def test_beside_samkit_it_installs_nothing_and_says_the_versions_and_the_device(commands, capsys) -> None:
    run(PLACEHOLDER)
    assert commands == []
    assert f"samkit {samkit.__version__}, torch " in (said := capsys.readouterr().out)
    assert f"device: {samkit.device()}" in said


def test_elsewhere_it_installs_nothing_and_says_how_to(commands, without_samkit) -> None:
    with pytest.raises(ImportError, match=rf"pip install 'samkit @ git\+{ADDRESS}'"):
        run(ADDRESS)
    assert commands == []


def test_in_colab_it_installs_samkit_alone_and_upgrades_nothing(commands, without_samkit, colab) -> None:
    run(ADDRESS)
    (command,) = commands
    assert command == [sys.executable, "-m", "pip", "install", "-q", f"samkit @ git+{ADDRESS}"]


def test_in_colab_without_an_address_it_says_what_to_do(commands, without_samkit, colab) -> None:
    with pytest.raises(ImportError, match=r"repository\.url in _config\.yml and runs `make address`"):
        run(PLACEHOLDER)
    assert commands == []
