"""The run times page: what the build measured for every chapter, beside the budgets.

``{run-times}`` becomes a table of seconds and visible code cells. A chapter over a budget is a warning, and
the strict build fails on it. Seconds count only where ``CI`` is set: a slow machine is no fault of the book.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from docutils import nodes
from myst_nb.sphinx_ import NbMetadataCollector
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from tables import link, table

SECONDS_EACH, SECONDS_ALL, CELLS_EACH = 90, 480, 30
HIDDEN = {"hide-input", "hide-cell", "remove-input", "remove-cell"}

logger = logging.getLogger(__name__)


class run_times(nodes.General, nodes.Element):
    """Stands where the table goes until all chapters have run."""


class RunTimes(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        return [run_times()]


def measured(env: BuildEnvironment) -> dict[str, tuple[float, int]]:
    """Document name -> seconds of its execution, number of visible code cells."""
    found = {}
    for name, data in sorted(NbMetadataCollector.get_doc_data(env).items()):
        if seconds := data.get("exec_data", {}).get("runtime"):
            cells = json.loads(Path(env.doc2path(name)).read_text(encoding="utf-8"))["cells"]
            visible = [
                cell
                for cell in cells
                if cell["cell_type"] == "code" and not HIDDEN & set(cell["metadata"].get("tags", ()))
            ]
            found[name] = seconds, len(visible)
    return found


class WriteRunTimes(SphinxPostTransform):
    default_priority = 8  # before references are resolved

    def run(self, **kwargs: object) -> None:
        for node in self.document.findall(run_times):
            chapters = measured(self.env)
            rows = [
                (link(self.env.docname, name), f"{seconds:.0f}", str(cells))
                for name, (seconds, cells) in chapters.items()
            ]
            total = sum(seconds for seconds, _ in chapters.values())
            rows.append((f"all chapters (budget {SECONDS_ALL} seconds)", f"{total:.0f}", ""))
            machine = nodes.paragraph(
                text=f"Measured by this build on {os.cpu_count()} cores ({platform.system()}, "
                f"{platform.machine()}), Python {platform.python_version()}, one chapter after the other."
            )
            header = (
                "chapter",
                f"seconds (budget {SECONDS_EACH})",
                f"visible code cells (budget {CELLS_EACH})",
            )
            node.replace_self([machine, table(header, rows)])


def check_budgets(app: Sphinx, env: BuildEnvironment) -> None:
    chapters = measured(env)
    for name, (seconds, cells) in chapters.items():
        if cells > CELLS_EACH:
            logger.warning(f"{cells} visible code cells, the budget is {CELLS_EACH}", location=name)
        if os.environ.get("CI") and seconds > SECONDS_EACH:
            logger.warning(f"ran for {seconds:.0f} s, the budget is {SECONDS_EACH} s", location=name)
    total = sum(seconds for seconds, _ in chapters.values())
    if os.environ.get("CI") and total > SECONDS_ALL:
        logger.warning(f"all chapters ran for {total:.0f} s, the budget is {SECONDS_ALL} s")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_node(run_times)
    app.add_directive("run-times", RunTimes)
    app.add_post_transform(WriteRunTimes)
    app.connect("env-check-consistency", check_budgets)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
