"""The pages that name things in the package name things that exist."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import samkit
from samkit import data, optim, training

BOOK = Path(__file__).parents[2] / "book"
OWNERS = {"SAM": optim.SAM, "XSAM": optim.XSAM, "Config": training.Config}


def code_in(page: str) -> set[str]:
    text = (BOOK / page).read_text(encoding="utf-8")
    prose = re.sub(r"^(`{3,}|:{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose))


def matches(pattern: str, *pages: str) -> list:
    found = {match for page in pages for code in code_in(page) for match in re.findall(pattern, code)}
    assert found, f"no page of {pages} matches {pattern}: this test would check nothing"
    return sorted(found)


PAGES = [page.name for page in sorted(BOOK.glob("*.md"))]


@pytest.mark.parametrize("name", matches(r"^samkit(?:\.\w+)+", *PAGES))
def test_a_dotted_name_in_the_text_exists(name):
    found = samkit
    for part in name.split(".")[1:]:
        if not hasattr(found, part) and inspect.ismodule(found):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)


@pytest.mark.parametrize(("owner", "argument"), matches(r"\b(SAM|XSAM|Config)\((\w+)=", *PAGES))
def test_an_argument_in_the_text_exists(owner, argument):
    parameters = inspect.signature(OWNERS[owner]).parameters
    # What SAM does not know goes to its base optimizer.
    known = {*parameters, *inspect.signature(optim.SAM).parameters} if owner == "XSAM" else set(parameters)
    if owner != "Config":
        known |= {"lr"}
    assert argument in known


def test_the_licence_page_lists_every_data_set_that_samkit_loads():
    text = (BOOK / "licences.md").read_text(encoding="utf-8")
    assert {name for name in data.NAMES if f'"{name}"' not in text} == set()


def test_the_version_to_cite_is_the_package_version():
    text = (BOOK / "how_to_cite.md").read_text(encoding="utf-8")
    assert re.search(r"version = \{(.*)\}", text)[1] == samkit.__version__


def test_no_entry_of_the_bibliography_is_there_twice_or_without_a_way_to_find_it():
    text = (BOOK / "references.bib").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{(\S+),$(.*?)^\}$", text, re.MULTILINE | re.DOTALL)
    keys = [key for key, _ in entries]
    assert len(keys) == len(set(keys)) == text.count("\n@")
    for key, fields in entries:
        given = set(re.findall(r"^  (\w+) +=", fields, re.MULTILINE))
        assert {"author", "title", "year"} <= given, key
        assert given & {"url", "doi", "booktitle", "journal"}, key
