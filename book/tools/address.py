"""Write the project's public address, ``repository.url`` of ``_config.yml``, everywhere it is needed.

``python book/tools/address.py`` replaces the address that ``pyproject.toml`` still holds by the new one in
badges, setup cells and project files, then copies ``book/setup_cell.py`` into every notebook.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
HOLDERS = ("*.md", "*.cff", "*.toml", "book/*.md", "book/*.py", "notebooks/*.ipynb", ".github/**/*.yml")


def repository_url(root: Path) -> str:
    url = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))["repository"]["url"]
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", url):
        raise SystemExit(
            f"repository.url in _config.yml is {url!r}; it must read https://github.com/owner/name "
            "(no slash or .git at its end): Colab and pip find the course there"
        )
    return url


def rewrite(root: Path, old: str, new: str) -> list[Path]:
    """Replace the address ``old`` and its ``owner/name`` by ``new`` in every file that may hold them."""
    changed = []
    for path in sorted({path for pattern in HOLDERS for path in root.glob(pattern)}):
        text = path.read_text(encoding="utf-8")
        other = text
        for before, after in ((old, new), (slug(old), slug(new))):
            # A whole name only: owner/sam must not match inside owner/samples.
            other = re.sub(rf"{re.escape(before)}(?![\w-])", lambda _, after=after: after, other)
        if other != text:
            path.write_text(other, encoding="utf-8")
            changed.append(path)
    return changed


def slug(url: str) -> str:
    return url.removeprefix("https://github.com/")


def copy_setup_cell(root: Path) -> list[Path]:
    """Make the first code cell of every notebook the text of ``book/setup_cell.py``."""
    text = (root / "book" / "setup_cell.py").read_text(encoding="utf-8").rstrip("\n")
    changed = []
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
        if "".join(first["source"]) != text:
            first["source"] = text.splitlines(keepends=True)
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            changed.append(path)
    return changed


def main(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    old, new = project["project"]["urls"]["Repository"], repository_url(root)
    changed = dict.fromkeys(rewrite(root, old, new) + copy_setup_cell(root))
    print(f"The project's address is {new}; {len(changed)} files changed")
    for path in changed:
        print(f"  {path.relative_to(root)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
