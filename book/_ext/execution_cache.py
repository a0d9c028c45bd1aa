"""Keep one cache of executed notebooks for each state of samkit and the lock file.

Jupyter Book's cache is keyed on a notebook's code alone: it would go on showing old numbers after a change in
the package that the notebook calls. Moving the cache with the code also makes Sphinx read every page again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config


def fingerprint(root: Path) -> str:
    """Hash the names and contents of everything that can change what a notebook computes."""
    files = [path for path in sorted((root / "samkit").rglob("*")) if "__pycache__" not in path.parts]
    digest = hashlib.sha256()
    for path in [root / "requirements.lock", *files]:
        if path.is_file():
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def choose_cache(app: Sphinx, config: Config) -> None:
    config.nb_execution_cache_path = str(
        Path(app.outdir).parent / ".jupyter_cache" / fingerprint(Path(app.srcdir))
    )


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", choose_cache)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
